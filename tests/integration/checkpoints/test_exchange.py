"""Checkpoints go to Megatron's `torch_dist` folders and come back bit-equal; what is damaged, strange or harmful is refused."""

import io
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_scenes import are_equal, change_metadata, job_file, newest, random_state, run, save, sentence, tiny
from torch.distributed.checkpoint import save as save_plainly

from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.megatron_tracker import look
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.events import submitted
from unicron_lib.errors import CheckpointError
from unicron_lib.journal import Journal
from unicron_lib.training import exporting

TRACKER = "latest_checkpointed_iteration.txt"


class Harm:
    """Would make a folder if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "store").mkdir()
    return FileStore(tmp_path / "store")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job's iteration 9 as Megatron's iteration 10; nobody may change it."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "store").mkdir()
    save(FileStore(folder / "store"), random_state(), 9)
    result = run("export", job_file(folder, tiny()), str(folder / "megatron"), "--store", FileStore(folder / "store").url)
    assert result.exit_code == 0, result.output
    return folder / "megatron"


@pytest.fixture
def megatron(exported: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "megatron"))


@pytest.mark.parametrize("params_dtype", ["float32", "float64", "bfloat16"])
def test_what_was_exported_is_imported_bit_equal(store: FileStore, tmp_path: Path, params_dtype: str) -> None:
    state = random_state(params_dtype)
    save(store, state, 9)
    spec = tiny(params_dtype=params_dtype)
    target = tmp_path / "megatron"
    result = run("export", job_file(tmp_path, spec), str(target), "--store", store.url, "--json")
    folder = str(target / "iter_0000010")
    told = {"job": "a", "iteration": 9, "folder": folder, "written": True, "resumed_from": True}
    assert json.loads(result.stdout) == told
    assert (look(target).resumes_from, look(target).problem) == (10, "")
    assert sorted(path.name for path in target.iterdir()) == ["iter_0000010", TRACKER]
    other = replace(spec, job="b")
    result = run("import", job_file(tmp_path, other), str(target), "--store", store.url, "--json")
    told = json.loads(result.stdout)
    assert (told["iteration"], told["notes"]) == (9, [])
    manifest, there = newest(store, "b")
    assert are_equal(there, state)
    assert (manifest.key, manifest.consumed_samples) == (told["checkpoint"], 40)


def test_a_job_of_the_cluster_is_exported_by_its_name(store: FileStore, tmp_path: Path) -> None:
    for iteration in (4, 9, 14):
        save(store, random_state(seed=iteration), iteration)
    assert "has no job a, there are none: give the job's file instead" in sentence("export", "a", "x", "--store", store.url)
    Journal(store).append(submitted(tiny(), submission="1", at=1.0))
    result = run("export", "a", str(tmp_path / "m"), "--iteration", "4", "--store", store.url)
    assert f"{tmp_path}/m/iter_0000005 holds what a was after iteration 4" in result.stderr
    told = sentence("export", "a", str(tmp_path / "m"), "--iteration", "7", "--store", store.url)
    assert told == "there is no checkpoint of iteration 7 that can be used"


def test_the_newest_that_is_whole_is_exported(store: FileStore, tmp_path: Path) -> None:
    save(store, random_state(), 9)
    key = save(store, random_state(seed=1), 14).shards[0].key
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    result = run("export", job_file(tmp_path, tiny()), str(tmp_path / "m"), "--store", store.url)
    assert re.search(r"passed over: .*: shard .* is damaged", result.stderr)
    assert (tmp_path / "m" / TRACKER).read_text() == "10"


def test_an_export_twice_is_one_and_another_one_is_refused(store: FileStore, tmp_path: Path) -> None:
    save(store, random_state(), 9)
    arguments = ("export", job_file(tmp_path, tiny()), str(tmp_path / "m"), "--store", store.url)
    run(*arguments)
    before = (tmp_path / "m" / "iter_0000010" / ".metadata").stat().st_mtime_ns
    assert "held already what a was after iteration 9" in run(*arguments).stderr
    assert (tmp_path / "m" / "iter_0000010" / ".metadata").stat().st_mtime_ns == before
    save(store, random_state(seed=1), 9, generation=1)
    assert re.search(r"m/iter_0000010 is there already and was not made of jobs/a/manifests/.*: choose", sentence(*arguments))


def test_megatron_is_not_sent_back(store: FileStore, tmp_path: Path) -> None:
    save(store, random_state(), 9)
    save(store, random_state(), 14)
    arguments = ("export", job_file(tmp_path, tiny()), str(tmp_path / "m"), "--store", store.url)
    run(*arguments)
    result = run(*arguments, "--iteration", "9")
    assert "Megatron would go on from a later iteration" in result.stderr
    assert (tmp_path / "m" / TRACKER).read_text() == "15"


def test_half_an_export_is_never_seen(store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, random_state(), 9)

    def breaks(folder: Path, *_: Any, **__: Any) -> None:
        (folder / ".metadata").write_text("half")
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(exporting, "write", breaks)
    assert sentence("export", job_file(tmp_path, tiny()), str(tmp_path / "m"), "--store", store.url) == "the disk is full"
    assert list((tmp_path / "m").iterdir()) == []


def test_another_model_is_not_exported(store: FileStore, tmp_path: Path) -> None:
    save(store, random_state(), 9)
    told = sentence("export", job_file(tmp_path, tiny(num_layers=3)), str(tmp_path / "m"), "--store", store.url)
    assert (
        "the checkpoint is of another model than job a has, the first tensor that differs is exp_avg.decoder.layers.2" in told
    )


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 64}, "has the shape [256, 32], the job's model [256, 64]: it is of another model"),
        ({"num_layers": 3}, "has the shape [2, 32], the job's model [3, 32]: it is of another model"),
        ({"vocab_size": 300}, "[300, 32]: write vocab_size: 256, which is what Megatron has padded it to, and trained"),
        ({"seq_length": 32}, "embedding.position_embeddings.weight has the shape [16, 32], the job's model [32, 32]: write"),
        (
            {"num_attention_heads": 4},
            "was trained with num_attention_heads 2, the job has 4: change num_attention_heads in the",
        ),
    ],
)
def test_the_first_mismatch_is_told(
    exported: Path, store: FileStore, tmp_path: Path, changes: dict[str, int], told: str
) -> None:
    assert told in sentence("import", job_file(tmp_path, tiny(**changes)), str(exported), "--store", store.url)
    assert store.list("jobs/") == []


def test_nothing_is_rounded_unasked(store: FileStore, tmp_path: Path) -> None:
    save(store, random_state("float64"), 9)
    run("export", job_file(tmp_path, tiny(params_dtype="float64")), str(tmp_path / "m"), "--store", store.url)
    told = sentence("import", job_file(tmp_path, tiny(job="b")), str(tmp_path / "m"), "--store", store.url)
    assert told.endswith("is float64, the job keeps float32: write params_dtype: float64")


def test_a_strange_parameter_is_refused(megatron: Path, store: FileStore, tmp_path: Path) -> None:
    def add(metadata: Any) -> None:
        metadata.state_dict_metadata["output_layer.weight"] = metadata.state_dict_metadata["embedding.word_embeddings.weight"]

    change_metadata(megatron / "iter_0000010", add)
    told = sentence("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert told == "the checkpoint has output_layer.weight, which the job's model lacks: it is of another model"


def rename(metadata: Any, old: str, new: str) -> None:
    """Give keys that begin with `old` another beginning; none, if `new` is empty."""
    described = metadata.state_dict_metadata
    for key in [key for key in described if key.startswith(old)]:
        value = described.pop(key)
        if new:
            described[key.replace(old, new)] = value
    metadata.storage_data = {
        replace(index, fqn=index.fqn.replace(old, new)): info
        for index, info in metadata.storage_data.items()
        if new or not index.fqn.startswith(old)
    }


def test_parameters_alone_begin_with_moments_of_zero(megatron: Path, store: FileStore, tmp_path: Path) -> None:
    change_metadata(megatron / "iter_0000010", lambda metadata: rename(metadata, "optimizer.", ""))
    result = run("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert (
        "note: without the optimizer's state: the moments begin at zero, and the job after its first iteration" in result.stderr
    )
    manifest, state = newest(store, "a")
    assert manifest.iteration == 0
    expected = {name: it if name.startswith("param.") else torch.zeros_like(it) for name, it in random_state().items()}
    assert are_equal(state, expected)


def test_moments_that_cannot_be_told_apart_are_refused_unless_left_out(
    megatron: Path, store: FileStore, tmp_path: Path
) -> None:
    new = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0."
    change_metadata(megatron / "iter_0000010", lambda metadata: rename(metadata, "optimizer.", new))
    arguments = ("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert "the optimizer's state is there, but not as a tensor for each parameter" in sentence(*arguments)
    assert run(*arguments, "--parameters-only").exit_code == 0


def test_a_plain_checkpoint_of_torch_is_imported(store: FileStore, tmp_path: Path) -> None:
    state = random_state()
    named = {name.removeprefix("param."): tensor for name, tensor in state.items() if name.startswith("param.")}
    moments = ("exp_avg", "exp_avg_sq")
    inner = {name: {moment: state[f"{moment}.{name}"] for moment in moments} for name in named}
    save_plainly({"model": named, "optimizer": {"state": inner}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    arguments = ("import", job_file(tmp_path, tiny()), str(tmp_path / "plain"), "--store", store.url)
    assert "does not say after how many iterations it was saved: give --iteration" in sentence(*arguments)
    assert run(*arguments, "--iteration", "6").exit_code == 0
    manifest, there = newest(store, "a")
    assert manifest.iteration == 5
    assert are_equal(there, state)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("7", "it would go on from iteration 7, which is not there: --iteration 10 is complete"),
        ("what", "says 'what', which Megatron cannot read: --iteration 10 is complete"),
        (None, "so that it begins anew: --iteration 10 is complete"),
    ],
)
def test_a_tracker_that_leads_nowhere(megatron: Path, store: FileStore, tmp_path: Path, named: str | None, told: str) -> None:
    (megatron / TRACKER).write_text(named) if named else (megatron / TRACKER).unlink()
    arguments = ("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert told in sentence(*arguments)
    assert run(*arguments, "--iteration", "10").exit_code == 0


def test_other_folders_are_told_apart(megatron: Path, store: FileStore, tmp_path: Path) -> None:
    rest = (job_file(tmp_path, tiny()), str(tmp_path / "m"), "--store", store.url)
    assert "holds no checkpoint: give one of Megatron-LM's directories" in sentence("import", *rest)
    (tmp_path / "m/iter_0000003/mp_rank_00").mkdir(parents=True)
    (tmp_path / "m/iter_0000003/mp_rank_00/model_optim_rng.pt").write_bytes(b"x")
    (tmp_path / "m" / TRACKER).write_text("3")
    assert "iteration 3 has the format torch, not torch_dist: have Megatron-LM save it anew" in sentence("import", *rest)
    folder = (megatron / "iter_0000010").rename(megatron / "iter_0000011")
    told = sentence("import", rest[0], str(folder), *rest[2:])
    assert "its common.pt is of iteration 10: it was put together of two checkpoints" in told


# --- what is damaged, or means harm ------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        (".metadata", cut, "is damaged: it is no whole pickle"),
        ("common.pt", cut, "common.pt is damaged, or no file of torch.save"),
        ("common.pt", flip, "common.pt is damaged, or no file of torch.save"),
        ("__0_0.distcp", cut, "__0_0.distcp is cut off: it has"),
        ("__0_0.distcp", flip, "has another CRC32 than was written"),
        ("__0_0.distcp", Path.unlink, "which lacks *.distcp"),
        (".metadata", Path.unlink, "which lacks .metadata"),
    ],
)
def test_damage_is_told_and_nothing_is_committed(
    megatron: Path, store: FileStore, tmp_path: Path, name: str, damage: Any, told: str
) -> None:
    damage(megatron / "iter_0000010" / name)
    assert told in sentence("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert store.list("jobs/a/manifests/") == []


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_that_would_do_harm_is_never_loaded(megatron: Path, store: FileStore, tmp_path: Path, name: str) -> None:
    path = megatron / "iter_0000010" / name
    harm = Harm(tmp_path / "made")
    if name == "common.pt":
        torch.save({"iteration": 10, "args": harm}, path)
    else:
        path.write_bytes(pickle.dumps({"state_dict_metadata": {"a": harm}}))
    told = sentence("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert told == f"{path} is refused: it names 'posix.mkdir', which no checkpoint needs"
    assert not (tmp_path / "made").exists()
    assert store.list("jobs/") == []


def test_a_tensor_that_would_do_harm_is_never_loaded(megatron: Path, store: FileStore, tmp_path: Path) -> None:
    path = megatron / "iter_0000010" / "__0_0.distcp"
    harmful = io.BytesIO()
    torch.save(Harm(tmp_path / "made"), harmful)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(harmful.getvalue())

    def point_there(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = size, len(harmful.getvalue())

    change_metadata(megatron / "iter_0000010", point_there)
    assert "cannot be read: " in sentence("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert not (tmp_path / "made").exists()
    assert store.list("jobs/a/manifests/") == []


def first_tensor(metadata: Any) -> Any:
    """The entry of a part of a tensor: objects are never read, wherever they are."""
    return next(index for index in metadata.storage_data if "_extra_state" not in index.fqn)


def elsewhere(metadata: Any) -> None:
    metadata.storage_data[first_tensor(metadata)].relative_path = "../../secret"


def beyond(metadata: Any) -> None:
    metadata.storage_data[first_tensor(metadata)].length = 1 << 60


def nowhere(metadata: Any) -> None:
    metadata.storage_data.pop(first_tensor(metadata))


def twice(metadata: Any) -> None:
    """Two parts of the same tensor at the same place leave another place without one."""
    chunks = next(it for it in metadata.state_dict_metadata.values() if len(it.chunks) == 2).chunks
    chunks[1] = chunks[0]


def huge(metadata: Any) -> None:
    next(iter(metadata.state_dict_metadata.values())).size = torch.Size([1 << 40, 32])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (elsewhere, "has no place inside the folder for"),
        (beyond, "is cut off"),
        (nowhere, "is in no file"),
        (twice, "has places that are nan, or in none of its parts"),
        (huge, "do not make up the tensor"),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(
    megatron: Path, store: FileStore, tmp_path: Path, change: Any, told: str
) -> None:
    change_metadata(megatron / "iter_0000010", change)
    assert told in sentence("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert store.list("jobs/a/manifests/") == []


# --- the job's own checkpoints ------------------------------------------------------------------------------------------


def test_a_job_that_runs_is_left_alone(exported: Path, store: FileStore, tmp_path: Path) -> None:
    Journal(store).append(submitted(tiny(), submission="1", at=1.0))
    told = sentence("import", job_file(tmp_path, tiny()), str(exported), "--store", store.url)
    assert told == "a is queued: cancel it first, or give the job another name"


def test_newer_checkpoints_are_set_aside_only_when_told(exported: Path, store: FileStore, tmp_path: Path) -> None:
    save(store, random_state(seed=2), 4)
    newer = save(store, random_state(seed=1), 14)
    arguments = ("import", job_file(tmp_path, tiny(load="")), str(exported), "--store", store.url)
    told = (
        "a has a checkpoint of iteration 14 already, the one to import is of 9: give the job another name, or --set-newer-aside"
    )
    assert sentence(*arguments) == told
    result = run(*arguments, "--set-newer-aside")
    assert "needs the key `load: latest`, else the job begins anew" in result.stderr
    manifest, state = newest(store, "a")
    assert manifest.iteration == 9
    assert are_equal(state, random_state())
    reason = CheckpointRepository(store, "a").condemned()[newer.key]
    assert reason == "set aside by unicron import, for one of iteration 9"
    assert "generation 0, which is never overwritten" in sentence(*arguments, "--set-newer-aside")


def test_a_damaged_source_sets_nothing_aside(megatron: Path, store: FileStore, tmp_path: Path) -> None:
    newer = save(store, random_state(seed=1), 14)
    flip(megatron / "iter_0000010" / "__0_0.distcp")
    arguments = ("import", job_file(tmp_path, tiny()), str(megatron), "--store", store.url)
    assert "CRC32" in sentence(*arguments, "--set-newer-aside")
    assert newest(store, "a")[0] == newer


def test_what_is_imported_counts_in_the_generation_that_comes(exported: Path, store: FileStore, tmp_path: Path) -> None:
    """Also where the job has run before, and others of its generations have been fenced off."""
    repository = CheckpointRepository(store, "a")
    save(store, random_state(seed=1), 2, generation=3)
    repository.fence(4)
    assert run("import", job_file(tmp_path, tiny()), str(exported), "--store", store.url).exit_code == 0
    repository.fence(5)
    manifest, _ = newest(store, "a")
    assert (manifest.iteration, manifest.generation) == (9, 4)
    repository.fence(6, anew=True)
    assert repository.newest_complete() == (None, [])
