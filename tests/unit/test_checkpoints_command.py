"""`unicron checkpoints`: every state is told with its reason, and damage is found."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.cli.checkpoints import checkpoints
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import UserError

app = typer.Typer()
app.command()(checkpoints)


def save(store: FileStore, iteration: int, *, generation: int = 2, job: str = "a") -> Manifest:
    repository = CheckpointRepository(store, job)
    shard = repository.put_shard(
        iteration=iteration, generation=generation, save="all", rank=0, data=b"x" * 50, tensors=("param.w",)
    )
    manifest = Manifest(
        job=job,
        generation=generation,
        iteration=iteration,
        loss=1.0,
        consumed_samples=8,
        layout=Layout(dp=2),
        shards=(shard,),
        committed_at=1.8e9,
        blocking_s=0.1,
        upload_s=2.0,
    )
    repository.commit(manifest)
    return manifest


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """One of each state."""
    store = FileStore(tmp_path)
    repository = CheckpointRepository(store, "a")
    save(store, 50, generation=1)
    save(store, 10, generation=1)
    repository.fence(2, up_to=20)
    save(store, 20)
    save(store, 30)
    repository.condemn(save(store, 31).key, "a bit was flipped")
    store.delete(save(store, 32).shards[0].key)
    repository.put_shard(iteration=33, generation=2, save="all", rank=0, data=b"x", tensors=("w",))
    save(store, 1, job="b")
    return store


def run(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def test_each_state_is_told_newest_first(store: FileStore) -> None:
    result = run("a", "--store", store.url, "--json")
    rows = json.loads(result.stdout)["checkpoints"]
    assert [(row["iteration"], row["state"]) for row in rows] == [
        (50, "fenced off"),
        (33, "incomplete"),
        (32, "incomplete"),
        (31, "condemned"),
        (30, "newest"),
        (20, "complete"),
        (10, "complete"),
    ]
    assert [row["reason"] for row in rows][1] == "it has no manifest: it is being saved, or its writer died"
    assert "is missing" in rows[2]["reason"]
    assert rows[3]["reason"] == "a bit was flipped"
    told = {"committed_at": 1.8e9, "bytes": 50, "shards": 1, "layout": {"tp": 1, "pp": 1, "dp": 2}, "blocking_s": 0.1}
    assert told.items() <= rows[4].items()
    assert result.exit_code == 0


def test_without_a_name_all_jobs_are_told(store: FileStore) -> None:
    rows = json.loads(run("--store", store.url, "--json").stdout)["checkpoints"]
    assert {row["job"] for row in rows} == {"a", "b"}
    assert "b" in run("--store", store.url).stdout


def test_the_newest_is_what_a_restart_takes(store: FileStore) -> None:
    rows = json.loads(run("a", "--store", store.url, "--json").stdout)["checkpoints"]
    newest, _ = CheckpointRepository(store, "a").newest_complete()
    assert newest is not None
    assert [row["iteration"] for row in rows if row["state"] == "newest"] == [newest.iteration]


def test_verifying_reads_every_byte(store: FileStore) -> None:
    result = run("a", "--store", store.url, "--verify", "--json")
    rows = json.loads(result.stdout)["checkpoints"]
    assert [row["iteration"] for row in rows if row["verified"]] == [30, 20, 10]
    assert "a, iteration 30: 0.0 of 0.0 MB" in result.stderr
    key = "jobs/a/shards/i0000000020-g2-all/r0.safetensors"
    store.put(key, b"y" + store.get(key)[1:])
    result = run("a", "--store", store.url, "--verify")
    assert result.exit_code == 1
    assert "DAMAGED" in result.stdout


def test_mistakes_are_one_sentence(store: FileStore) -> None:
    for arguments, told in ((["../a"], "is no job's name"), (["c"], "job c has no checkpoints in .*: there are those of a, b")):
        with pytest.raises(UserError, match=told):
            app([*arguments, "--store", store.url], standalone_mode=False)
