"""A checkpoint of Megatron's, or a plain one of torch's, becomes one of a job's own: tensor by tensor, then the manifest."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unicron_lib.checkpointing.manifest import Manifest, Shard
from unicron_lib.checkpointing.megatron_tracker import look
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.store import ignore
from unicron_lib.checkpointing.tensors import pack
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError
from unicron_lib.training.dcp_files import METADATA, Folder, Stored
from unicron_lib.training.megatron_facts import Facts, read_facts, refuse_another_model
from unicron_lib.training.torch_dist import MAIN_PARAMETER, MOMENTS, Place, places

SET_ASIDE = "set aside by unicron import, for one of iteration"
SHARD_BYTES = 512 << 20
"""Tensors are read and uploaded until a shard has so many bytes: more is not held at once, but for one larger tensor."""
PARAMETER = "param"
OPTIMIZER = ("optimizer", "chained_", "optim.")
PREFIXES = ("", "model.", "module.")
"""Of parameters in checkpoints of torch's own: what the model was called."""

Targets = dict[str, list[tuple[str, int | None]]]
"""By the key of a stored tensor: the tensors of the state that it holds, whole or as a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that fits the job, opened: what will become of which tensor, and `iterations` that it has behind it.

    `notes` are sentences for whoever imports it.
    """

    folder: Folder
    targets: Targets
    missing: Mapping[str, tuple[int, ...]]
    iterations: int
    notes: tuple[str, ...]

    @property
    def iteration(self) -> int:
        """The job's own number, of the iteration that is done. Without moments all begins at 0, for Adam counts from there."""
        return 0 if self.missing else max(0, self.iterations - 1)


def find(directory: Path, iterations: int | None) -> tuple[Path, int | None]:
    """The folder of one checkpoint, and after how many iterations it was saved, None if its name does not say.

    That is the directory itself, or in Megatron-LM's layout what Megatron would resume from, or `iter_` so many.
    Raises CheckpointError if there is none that is complete.
    """
    if (directory / METADATA).is_file():
        number = directory.name.removeprefix("iter_")
        named = int(number) if number.isascii() and number.isdigit() and len(number) < 11 else None
        return directory, iterations if iterations is not None else named
    found = look(directory)
    if not found.saved and found.tracker is None:
        raise CheckpointError(
            f"{directory} holds no checkpoint: give one of Megatron-LM's directories (--save), or an iter_ folder"
        )
    wanted = iterations if iterations is not None else found.resumes_from
    if wanted == "release":
        return directory / "release", 0
    saved = next((it for it in found.saved if it.iteration == wanted), None)
    if saved is None or saved.problem:
        why = saved.problem if saved else "which is not there"
        best = f"--iteration {found.newest_complete} is" if found.newest_complete is not None else "no other one is"
        told = f"it would go on from iteration {wanted}, {why}" if wanted is not None else found.problem or "it has no tracker"
        raise CheckpointError(f"{directory}: {told}: {best} complete")
    if saved.format != "torch_dist":
        raise CheckpointError(
            f"{directory}: iteration {wanted} has the format {saved.format}, not torch_dist: have Megatron-LM save it anew "
            "with --ckpt-convert-format torch_dist"
        )
    return directory / f"iter_{saved.iteration:07d}", saved.iteration


def open_source(directory: Path, iterations: int | None, spec: JobSpec, *, parameters_only: bool = False) -> Source:
    """Open a checkpoint and find everything that the job's model needs; raises CheckpointError with the first mismatch."""
    path, named = find(directory, iterations)
    folder, facts = Folder(path), read_facts(path)
    if named and facts.iterations is not None and facts.iterations != named:
        raise CheckpointError(
            f"{path}: its common.pt is of iteration {facts.iterations}: it was put together of two checkpoints"
        )
    behind = named if named is not None else facts.iterations
    if behind is None:
        raise CheckpointError(f"{path} does not say after how many iterations it was saved: give --iteration")
    where = places(spec)
    targets = _parameters(folder, where)
    refuse_another_model(spec, facts)
    _refuse_strange(folder, targets)
    moments, missing = _moments(folder, where, parameters_only=parameters_only)
    for key, entries in moments.items():
        targets.setdefault(key, []).extend(entries)
    _refuse_rounding(folder, targets, spec)
    notes = tuple(_notes(folder, targets, facts, behind, has_moments=not missing, spec=spec))
    return Source(folder=folder, targets=targets, missing=missing, iterations=behind, notes=notes)


# --- what lies where --------------------------------------------------------------------------------------------------


def _parameters(folder: Folder, where: Mapping[str, Place]) -> Targets:
    targets: Targets = {}
    for name, place in where.items():
        mains = [(f"optimizer.state.{MAIN_PARAMETER}.{key}", layer) for key, layer in _keys(place)]
        found = _first(folder, [*mains, *_keys(place), *((prefix + name, None) for prefix in PREFIXES)])
        if found is None:
            raise CheckpointError(f"the checkpoint has no {place.key}, which the job's model has: it is of another model")
        _refuse_shape(folder.tensors[found[0]], *found, place)
        targets.setdefault(found[0], []).append((f"{PARAMETER}.{name}", found[1]))
    return targets


def _moments(
    folder: Folder, where: Mapping[str, Place], *, parameters_only: bool
) -> tuple[Targets, dict[str, tuple[int, ...]]]:
    """Where the moments lie, and the shapes of those that are nowhere: all or none."""
    targets: Targets = {}
    missing: dict[str, tuple[int, ...]] = {}
    for name, place in where.items():
        for moment in MOMENTS:
            state = f"optimizer.state.{moment}."
            keys = [(state + key, layer) for key, layer in _keys(place)]
            torchs = [
                (f"{start}state.{prefix}{name}.{moment}", None) for start in ("optimizer.", "optim.") for prefix in PREFIXES
            ]
            found = None if parameters_only else _first(folder, [*keys, (state + name, None), *torchs])
            if found is None:
                missing[f"{moment}.{name}"] = place.shape
                continue
            _refuse_shape(folder.tensors[found[0]], *found, place)
            targets.setdefault(found[0], []).append((f"{moment}.{name}", found[1]))
    if missing and not parameters_only and any(key.startswith(OPTIMIZER) for key in folder.keys):
        raise CheckpointError(
            f"the optimizer's state is there, but not as a tensor for each parameter ({next(iter(missing))} is not found): "
            "save it with --dist-ckpt-optim-fully-reshardable or without --use-distributed-optimizer, or give --parameters-only"
        )
    return targets, missing


def _keys(place: Place) -> list[tuple[str, int | None]]:
    stacked: list[tuple[str, int | None]] = [(place.stacked_key, place.layer)] if place.stacked_key else []
    return [*stacked, (place.key, None)]


def _first(folder: Folder, keys: list[tuple[str, int | None]]) -> tuple[str, int | None] | None:
    return next((it for it in keys if it[0] in folder.tensors), None)


def _refuse_shape(stored: Stored, key: str, layer: int | None, place: Place) -> None:
    expected = place.shape if layer is None else (place.num_layers, *place.shape)
    if stored.shape == expected:
        return
    advice = "it is of another model"
    if "word_embeddings" in key and stored.shape[1:] == expected[1:]:
        advice = f"write vocab_size: {stored.shape[0]}, which is what Megatron has padded it to, and trained"
    elif "position_embeddings" in key and stored.shape[1:] == expected[1:]:
        advice = f"write seq_length: {stored.shape[0]}"
    raise CheckpointError(f"{key} has the shape {list(stored.shape)}, the job's model {list(expected)}: {advice}")


def _refuse_strange(folder: Folder, targets: Targets) -> None:
    """Parameters that the job's model lacks: it would compute something else without them."""
    known = {*targets, *(key.removeprefix(f"optimizer.state.{MAIN_PARAMETER}.") for key in targets)}
    strange = sorted(key for key in folder.tensors if key not in known and not key.startswith(OPTIMIZER))
    if strange:
        raise CheckpointError(f"the checkpoint has {strange[0]}, which the job's model lacks: it is of another model")


def main_dtype(spec: JobSpec) -> torch.dtype:
    """What the job keeps its parameters and moments in."""
    return torch.float64 if spec.params_dtype == "float64" else torch.float32


def _refuse_rounding(folder: Folder, targets: Targets, spec: JobSpec) -> None:
    main = main_dtype(spec)
    wide = next((key for key in targets if torch.promote_types(folder.tensors[key].dtype, main) != main), None)
    if wide is not None:
        raise CheckpointError(f"{wide} is float64, the job keeps float32: write params_dtype: float64")


def _notes(folder: Folder, targets: Targets, facts: Facts, behind: int, *, has_moments: bool, spec: JobSpec) -> Iterator[str]:
    if not has_moments:
        yield "without the optimizer's state: the moments begin at zero, and the job after its first iteration"
    narrow = next((key for key, it in targets.items() if folder.tensors[key].dtype.itemsize < 4 and it), None)
    if narrow is not None:
        yield f"{narrow} is there in {str(folder.tensors[narrow].dtype).removeprefix('torch.')} only"
    if has_moments and facts.steps is not None and facts.steps != behind:
        yield f"the optimizer has made {facts.steps} steps in {behind} iterations: Adam's correction will count iterations"
    if has_moments and behind >= spec.train_iters:
        yield f"train_iters is {spec.train_iters}: after {behind} iterations there is nothing left to do"
    samples, batch = facts.args.get("consumed_train_samples"), behind * spec.global_batch_size
    if has_moments and samples is not None and samples != batch:
        yield f"it has consumed {samples} samples, the job's own data go on after {batch}"


# --- the checkpoint -----------------------------------------------------------------------------------------------------


def bring_in(
    source: Source,
    repository: CheckpointRepository,
    spec: JobSpec,
    *,
    generation: int,
    set_aside: Sequence[str] = (),
    arrived: Callable[[int], None] = ignore,
) -> Manifest:
    """Upload the state as a checkpoint of the job and commit it; `arrived` is told how many bytes are there.

    Other checkpoints are condemned between the two: a damaged source costs the job none of its own.
    Raises CheckpointError for such a source, StoreError, and StaleGeneration if the generation has been replaced.
    """
    save, done = f"import-{secrets.token_hex(6)}", 0
    shards: list[Shard] = []
    for tensors in _batches(source, main_dtype(spec)):
        shard = repository.put_shard(
            iteration=source.iteration,
            generation=generation,
            save=save,
            rank=len(shards),
            data=pack(tensors),
            tensors=tuple(tensors),
        )
        shards.append(shard)
        done += shard.num_bytes
        arrived(done)
    manifest = Manifest(
        job=spec.job,
        generation=generation,
        iteration=source.iteration,
        loss=0.0,  # nobody knows it
        consumed_samples=(source.iteration + 1) * spec.global_batch_size,
        layout=Layout(dp=1),
        shards=tuple(shards),
        committed_at=time.time(),
    )
    for key in set_aside:
        repository.condemn(key, f"{SET_ASIDE} {manifest.iteration}")
    repository.commit(manifest)
    return manifest


def _batches(source: Source, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The whole state, in parts of about `SHARD_BYTES`."""
    held: dict[str, torch.Tensor] = {}
    for tensors in _tensors(source, dtype):
        held |= tensors
        if sum(it.nbytes for it in held.values()) >= SHARD_BYTES:
            yield held
            held = {}
    if held:
        yield held


def _tensors(source: Source, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    for key, entries in source.targets.items():
        stored = source.folder.read([key])[key].to(dtype)
        yield {name: stored if layer is None else stored[layer] for name, layer in entries}
    for name, shape in source.missing.items():
        yield {name: torch.zeros(shape, dtype=dtype)}
