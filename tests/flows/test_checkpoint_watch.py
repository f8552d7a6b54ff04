"""A job's checkpoints are told as they come, and an old one is warned of, once."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import checkpoints as watching
from tasks.checkpoints import CheckpointWatch
from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.freshness import LATE_S, OVERDUE_S, Level, judge
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[dict[str, str]], str]]:
    told = []

    async def report(*what: object) -> None:
        told.append(what)

    monkeypatch.setattr(watching, "report_checkpoints", report)
    return told


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    store = FileStore(tmp_path)
    monkeypatch.setattr(watching, "services", lambda: SimpleNamespace(store=store))
    return store


def save(store: FileStore, iteration: int, at: float) -> None:
    repository = CheckpointRepository(store, "a")
    shard = repository.put_shard(iteration=iteration, generation=1, save="all", rank=0, data=b"x" * 10**6, tensors=("w",))
    manifest = Manifest(
        job="a",
        generation=1,
        iteration=iteration,
        loss=1.0,
        consumed_samples=8,
        layout=Layout(),
        shards=(shard,),
        committed_at=at,
        blocking_s=0.25,
        upload_s=4.0,
    )
    repository.commit(manifest)


def live(began: float, iteration_s: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(first_iteration_at=began, iteration_s=iteration_s)


async def test_each_checkpoint_is_told_once_with_its_size_and_times(store: FileStore, told: list) -> None:
    watch = CheckpointWatch(JobSpec(job="a"))
    await watch.look(None)
    assert told == []
    save(store, 19, at=1000.0)
    for _ in range(3):
        await watch.look(None)
    ((job, (row,), _),) = told
    assert job == "a"
    assert (row["iteration"], row["MB"], row["blocking s"], row["upload s"]) == ("19", "1.00", "0.250", "4.000")
    assert row["saved (UTC)"] == "1970-01-01 00:16:40"
    save(store, 39, at=1024.0)
    await watch.look(None)
    assert [row["state"] for row in told[-1][1]] == ["newest", "complete"]


async def test_an_old_one_is_warned_of_then_alarmed_once_each(
    store: FileStore, told: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="unicron.checkpoints")
    save(store, 19, at=1000.0)
    watch = CheckpointWatch(JobSpec(job="a", save_interval=20))
    levels = []
    for now in (1001.0, 1060.0, 1080.0, 1090.0, 1400.0, 1401.0):
        monkeypatch.setattr(watching.time, "time", lambda now=now: now)
        freshness = await watch.look(live(900.0))
        levels.append(freshness.level)
    assert levels == [Level.FRESH, Level.FRESH, Level.LATE, Level.LATE, Level.OVERDUE, Level.OVERDUE]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "there should be one every 24 s" in caplog.text


def test_what_is_usual_decides() -> None:
    assert judge("a", age_s=LATE_S + 1, usual_s=1000.0).level is Level.FRESH
    assert judge("a", age_s=3001.0, usual_s=1000.0).level is Level.LATE
    assert judge("a", age_s=OVERDUE_S + 1, usual_s=0.1).level is Level.OVERDUE
