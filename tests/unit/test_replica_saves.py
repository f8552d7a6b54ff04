"""Ranks that have parked save the replica that they are together, each its part, and the first one commits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from elastic_world import small_job
from layout_world import train, whole_state
from memory_store import MemoryStore

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.plans import Layout
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.handover import Memory
from unicron_lib.training.position import Position
from unicron_lib.training.saver import Saver
from unicron_lib.training.shards import read_state
from unicron_lib.training.term import Term

LAYOUT = Layout(tp=2, pp=2, dp=2)
SPEC = small_job(
    num_layers=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, min_gpus=4, hidden_dropout=0.0, train_iters=2
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield train(SPEC, LAYOUT, iterations=2)[0]
    dist.destroy_process_group()


def environment(rank: int, **more) -> RankEnvironment:
    where = {"run_dir": Path("/nowhere"), "agent_socket": "", "store_url": "", "master_addr": "", "master_port": 0, "node": "n"}
    return RankEnvironment(spec=SPEC, generation=3, rank=rank, world_size=8, local_rank=rank, tp=2, pp=2, **where | more)


def saver(repository: CheckpointRepository, rank: int) -> Saver:
    return Saver(repository, environment(rank))


def save(repository: CheckpointRepository, replicas: list, rank: int, *, lineage: int = 2) -> str | None:
    position = Position(iteration=1, loss=0.5, generation=lineage, is_whole=True)
    return saver(repository, rank).save_replica(position, replicas[rank].state())


@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (0, 5, 2, 7)], ids=["one replica", "parts of two"])
def test_what_is_saved_is_the_whole_state(replicas: list, ranks: tuple[int, ...]) -> None:
    repository = CheckpointRepository(MemoryStore(), SPEC.job)
    first, *others = ranks
    assert [save(repository, replicas, rank) for rank in others] == ["", "", ""]
    key = save(repository, replicas, first)
    manifest = repository.load_manifest(key)
    assert (manifest.layout, manifest.iteration, manifest.generation, manifest.format) == (LAYOUT, 1, 3, 2)
    found, expected = read_state(repository, manifest), whole_state(replicas, LAYOUT)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_who_falls_back_on_it_knows_the_generation_that_wrote_it(replicas: list, tmp_path: Path) -> None:
    repository = CheckpointRepository(MemoryStore(), SPEC.job)
    *_, key = [save(repository, replicas, rank) for rank in (5, 6, 7, 4)]
    for given, expected in ((key, (1, 3)), (None, (-1, -1))):
        env = environment(0, restore_from=given, store_url=tmp_path.as_uri())
        fallback = Term(env, None, BeatWriter(None))._fallback(Memory(replica=replicas[0]))
        assert (fallback.iteration, fallback.generation) == expected


def test_without_all_parts_of_one_state_nothing_is_committed(replicas: list, caplog) -> None:
    repository = CheckpointRepository(MemoryStore(), SPEC.job)
    for rank, lineage in ((5, 2), (6, 2), (7, 1)):
        save(repository, replicas, rank, lineage=lineage)
    assert save(repository, replicas, 4) is None
    assert "not all of its ranks have written their parts" in caplog.text
    assert repository.manifest_keys() == []
