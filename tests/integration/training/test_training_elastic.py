"""Ranks that survive keep their process, their memory, and what they have computed of the iteration under way."""

import signal
import time

import pytest
from elastic import assert_undisturbed, first, held, job, reached

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.beats import BeatReader, beat_path
from unicron_lib.agent.rank_messages import RankDrained, RankFailed, RankHello, RankParked
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.sections import Section


@pytest.mark.parametrize(("world_size", "lost"), [(3, {1}), (2, {0}), (4, {0, 2})])
def test_survivors_of_a_crash_lose_nothing_and_a_newcomer_takes_the_lost_place(
    ranks, undisturbed: list[float], world_size: int, lost: set[int]
) -> None:
    spec = job("crashed")
    ranks.launch(spec, world_size)
    survivors = sorted(set(range(world_size)) - lost)
    reached(ranks, 3, rank=survivors[0])
    killed_at = time.monotonic()
    for rank in lost:
        ranks.signal("crashed", 1, rank, signal.SIGKILL)
    failed = {rank: ranks.agent.wait(RankFailed, generation=1, rank=rank) for rank in survivors}
    assert all(failure.parked for _, failure in failed.values())
    parked = held(ranks, "abort", generation=1, of=survivors)
    assert {rank: p.iteration for rank, p in parked.items()} == {rank: f.iteration for rank, (_, f) in failed.items()}
    parked_at = time.monotonic()
    ranks.launch(spec, world_size, generation=2, kept={rank: (1, rank) for rank in survivors})
    began = first(ranks, generation=2, world_size=world_size)
    print(  # noqa: T201
        f"killed -> parked {max(at for at, _ in failed.values()) - killed_at:.3f} s, "
        f"assigned -> first iteration of all {time.monotonic() - parked_at:.3f} s"
    )
    newest = max(p.iteration for p in parked.values())
    holders = [rank for rank, p in parked.items() if p.iteration == newest]
    assert {p.iteration for p in began} == {newest + 1}
    for rank, progress in enumerate(began):
        assert (progress.source == "own memory") == (rank in holders)
        assert (progress.copied_bytes > 0) >= (rank not in holders)
        assert rank in holders or progress.source in {f"rank {holder}" for holder in holders}
    assert sum(p.kept_micro_batches for p in began) == sum(parked[rank].micro_batches for rank in holders)
    assert sum(p.kept_micro_batches + p.recomputed_micro_batches for p in began) <= spec.num_micro_batches
    assert [p.discarded_micro_batches for p in began] == [0] * world_size
    assert [ranks.pid("crashed", 2, rank) for rank in survivors] == [ranks.pid("crashed", 1, rank) for rank in survivors]
    assert [len(ranks.agent.all(RankHello, generation=2, rank=rank)) for rank in survivors] == [0] * len(survivors)
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=world_size)


def test_what_a_survivor_writes_and_how_it_lives_is_its_new_place_s(ranks) -> None:
    """The log, the signs of life, the error file, and the checkpoints."""
    spec = job("moved", save_interval=4)
    ranks.launch(spec, 2)
    reached(ranks, 1)
    held(ranks, "park", generation=1, of=(0, 1))
    ranks.launch(spec, 2, generation=2, kept={0: (1, 1), 1: (1, 0)})
    reached(ranks, 8, generation=2)
    reader = BeatReader(beat_path(ranks.run_dir, "moved", 2, 0))
    beat = reader.read()
    reader.close()
    assert beat.iteration >= 7
    assert "rank 1 of generation 1 goes on as rank 0 of generation 2" in ranks.log_of("moved", 2, 0)
    assert "generation 2" not in ranks.log_of("moved", 1, 1)
    ranks.agent.order(2, 1, "raise")
    _, failure = ranks.agent.wait(RankFailed, generation=2, rank=1)
    assert not failure.parked
    assert ranks.exit_code("moved", 2, 1) == 1
    assert "InjectedError" in (ranks.run_dir / "error-2-1.json").read_text()
    assert not (ranks.run_dir / "error-1-0.json").exists()
    manifest, _ = CheckpointRepository(open_store(ranks.store_url), "moved").newest_complete()
    assert (manifest.generation, manifest.iteration) == (2, 7)


def test_a_job_is_tried_again_with_all_its_ranks_and_no_new_process(ranks, undisturbed: list[float]) -> None:
    """SEV3: nobody is lost, and everybody's micro-batches count."""
    spec = job("again")
    ranks.launch(spec, 3)
    reached(ranks, 2)
    parked = held(ranks, "abort", generation=1, of=range(3))
    assert ranks.agent.all(RankFailed, generation=1, rank=0) == [], "an order is no failure"
    ranks.launch(spec, 3, generation=2, kept={rank: (1, rank) for rank in range(3)})
    began = first(ranks, generation=2, world_size=3)
    if len({p.iteration for p in parked.values()}) == 1:
        assert [p.kept_micro_batches for p in began] == [parked[rank].micro_batches for rank in range(3)]
    assert [p.recomputed_micro_batches for p in began] == [0, 0, 0]
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=3)


def test_a_job_grows_and_shrinks_by_parking_together(ranks, undisturbed: list[float]) -> None:
    spec = job("sized")
    ranks.launch(spec, 2)
    reached(ranks, 2)
    parked = held(ranks, "park", generation=1, of=(0, 1))
    assert len({p.iteration for p in parked.values()}) == 1
    assert {p.micro_batches for p in parked.values()} == {0}
    ranks.launch(spec, 4, generation=2, kept={0: (1, 0), 1: (1, 1)})
    began = first(ranks, generation=2, world_size=4)
    assert [p.source.split()[0] for p in began] == ["own", "own", "rank", "rank"]
    assert {p.iteration for p in began} == {parked[0].iteration + 1}
    held(ranks, "park", generation=2, of=range(4))
    for rank in (0, 2):
        ranks.agent.order(2, rank, "quit")
        assert ranks.exit_code("sized", 2, rank) == 0
    ranks.launch(spec, 2, generation=3, kept={0: (2, 3), 1: (2, 1)})
    assert [p.source for p in first(ranks, generation=3, world_size=2)] == ["own memory"] * 2
    assert_undisturbed(ranks, spec, undisturbed, generation=3, world_size=2)


def test_one_order_parks_all_ranks_at_the_same_iteration_and_a_drain_outdoes_it(ranks) -> None:
    spec = job("agreed", train_iters=1000)
    ranks.launch(spec, 3)
    reached(ranks, 1)
    ranks.agent.order(1, 2, "park")
    parked = [ranks.agent.wait(RankParked, generation=1, rank=rank)[1] for rank in range(3)]
    assert len({p.iteration for p in parked}) == 1
    ranks.launch(spec, 3, generation=2, kept={rank: (1, rank) for rank in range(3)})
    reached(ranks, parked[0].iteration + 2, generation=2)
    ranks.agent.order(2, 0, "park")
    ranks.agent.order(2, 1, "drain")
    drained = [ranks.agent.wait(RankDrained, generation=2, rank=rank)[1] for rank in range(3)]
    assert len({(d.iteration, d.manifest) for d in drained}) == 1
    assert drained[0].manifest is not None
    assert [ranks.exit_code("agreed", 2, rank) for rank in range(3)] == [0, 0, 0]


def test_ranks_that_park_while_a_checkpoint_is_saved_do_not_lose_it(ranks, undisturbed: list[float]) -> None:
    spec = job("saving", save_interval=1, pace_s=0.02)
    ranks.launch(spec, 2)
    reached(ranks, 2)
    parked = held(ranks, "park", generation=1, of=(0, 1))
    ranks.launch(spec, 2, generation=2, kept={0: (1, 1), 1: (1, 0)})
    assert {p.iteration for p in first(ranks, generation=2, world_size=2)} == {parked[0].iteration + 1}
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=2)
    assert "not all ranks wrote their shards" not in ranks.logs()


def test_ranks_without_any_state_begin_from_the_checkpoint(ranks, undisturbed: list[float]) -> None:
    """All that had the state are lost; one that never got one has parked meanwhile."""
    spec = job("lost", save_interval=3, pace_s=0.05)
    ranks.launch(spec, 2)
    reached(ranks, 6)
    for rank in range(2):
        ranks.signal("lost", 1, rank, signal.SIGKILL)
        ranks.exit_code("lost", 1, rank)
    repository = CheckpointRepository(open_store(ranks.store_url), "lost")
    manifest, _ = repository.newest_complete()
    ranks.launch(spec, 2, generation=2, restore_from=manifest.key, only={0})
    ranks.agent.wait(RankHello, generation=2, rank=0)
    parked = held(ranks, "abort", generation=2, of=(0,))
    assert (parked[0].iteration, parked[0].micro_batches) == (-1, 0)
    ranks.agent.order(2, 0, "save_replica")
    _, answer = ranks.agent.wait(RankDrained, generation=2, rank=0)
    assert (answer.iteration, answer.manifest) == (manifest.iteration, manifest.key)
    ranks.launch(spec, 2, generation=3, restore_from=manifest.key, kept={1: (2, 0)})
    began = first(ranks, generation=3, world_size=2)
    assert [(p.source, p.iteration, p.copied_bytes) for p in began] == [(manifest.key, manifest.iteration + 1, 0)] * 2
    assert_undisturbed(ranks, spec, undisturbed, generation=3, world_size=2)


def test_a_parked_rank_waits_in_a_section_without_a_limit(ranks) -> None:
    ranks.launch(job("waiting", train_iters=1000), 1)
    reached(ranks, 0)
    held(ranks, "abort", generation=1, of=(0,))
    reader = BeatReader(beat_path(ranks.run_dir, "waiting", 1, 0))
    assert reader.read().section is Section.PARKED
    reader.close()
    ranks.agent.order(1, 0, "drain")
    ranks.agent.order(1, 0, "quit")
    assert ranks.exit_code("waiting", 1, 0) == 0
    assert "parked: drain is ignored" in ranks.log_of("waiting", 1, 0)
