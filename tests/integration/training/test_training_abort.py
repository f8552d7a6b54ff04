"""An abort ends whatever a rank waits for, at once, and costs nothing that it has in memory."""

import signal
import threading
import time

import pytest
from elastic import assert_undisturbed, first, held, job, reached

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankFailed, RankFinished, RankHello, RankParked
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.training.ledger import check_ledger, ledger_directory


def test_a_hang_becomes_survivors_that_go_on_without_the_hanging_rank(ranks, undisturbed: list[float]) -> None:
    """gloo itself would wait for the stopped peer as long as the job's timeout."""
    spec = job("hung")
    ranks.launch(spec, 3)
    reached(ranks, 2)
    ranks.stop("hung", 1, 1)
    threading.Event().wait(2 * spec.pace_s)  # until both are in the all-reduce, most likely
    began = time.monotonic()
    parked = held(ranks, "abort", generation=1, of=(0, 2))
    print(f"abort -> parked {time.monotonic() - began:.3f} s")  # noqa: T201
    assert ranks.agent.all(RankFailed, generation=1, rank=0) == [], "an ordered end is no failure"
    ranks.signal("hung", 1, 1, signal.SIGKILL)
    ranks.launch(spec, 2, generation=2, kept={0: (1, 0), 1: (1, 2)})
    began = first(ranks, generation=2, world_size=2)
    assert {p.iteration for p in began} == {max(p.iteration for p in parked.values()) + 1}
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=2)


def test_an_abort_in_the_middle_of_an_iteration_keeps_the_micro_batches_that_are_done(ranks) -> None:
    changes = {"train_iters": 3, "pace_s": 0.0, "seq_length": 128, "hidden_size": 128, "num_layers": 4}
    ranks.launch(job("whole", **changes), 1)
    ranks.agent.wait(RankFinished, generation=1, rank=0)
    losses = [p.loss for p in ranks.agent.all(Progress, generation=1, rank=0)]
    spec = job("midway", **changes)
    ranks.launch(spec, 1, generation=2)
    reached(ranks, 0, generation=2)
    parked = held(ranks, "abort", generation=2, of=(0,))[0]
    ranks.launch(spec, 2, generation=3, kept={1: (2, 0)})
    began = first(ranks, generation=3, world_size=2)
    if parked.micro_batches:
        assert [p.kept_micro_batches for p in began] == [0, parked.micro_batches]
    assert_undisturbed(ranks, spec, losses, generation=3, world_size=2)


def test_an_abort_is_heard_while_a_rank_keeps_its_pace(ranks) -> None:
    ranks.launch(job("paced", pace_s=30.0), 1)
    ranks.agent.wait(RankHello, generation=1, rank=0)
    threading.Event().wait(0.5)
    began = time.monotonic()
    held(ranks, "abort", generation=1, of=(0,))
    assert time.monotonic() - began < 10.0, "it would have slept"


def test_a_second_crash_while_the_others_meet_is_no_dead_end(ranks, undisturbed: list[float]) -> None:
    """One survivor is lost before it has joined: the others, who wait for it, park again and go on without it."""
    spec = job("twice")
    ranks.launch(spec, 4)
    reached(ranks, 2)
    ranks.signal("twice", 1, 3, signal.SIGKILL)
    for rank in (0, 1, 2):
        ranks.agent.wait(RankFailed, generation=1, rank=rank)
    parked = held(ranks, "abort", generation=1, of=(0, 1, 2))
    ranks.signal("twice", 1, 2, signal.SIGKILL)
    ranks.exit_code("twice", 1, 2)
    ranks.launch(spec, 3, generation=2, only={0, 1}, kept={0: (1, 0), 1: (1, 1)})
    again = held(ranks, "abort", generation=2, of=(0, 1))
    assert {r: (p.iteration, p.micro_batches) for r, p in again.items()} == {
        r: (parked[r].iteration, parked[r].micro_batches) for r in (0, 1)
    }
    ranks.launch(spec, 2, generation=3, kept={0: (2, 1), 1: (2, 0)})
    first(ranks, generation=3, world_size=2)
    assert_undisturbed(ranks, spec, undisturbed, generation=3, world_size=2)


def test_a_rank_that_is_stopped_while_the_others_meet_does_not_hold_them(ranks) -> None:
    spec = job("stuck", train_iters=1000)
    ranks.launch(spec, 3)
    reached(ranks, 1)
    parked = held(ranks, "park", generation=1, of=range(3))
    ranks.stop("stuck", 1, 2)
    ranks.launch(spec, 3, generation=2, kept={rank: (1, rank) for rank in range(3)})
    threading.Event().wait(0.3)
    again = held(ranks, "abort", generation=2, of=(0, 1))
    assert {p.iteration for p in again.values()} == {parked[0].iteration}


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_a_rank_parks_at_any_moment_of_its_start(ranks, wait_s: float) -> None:
    spec = job("early", train_iters=1000)
    ranks.launch(spec, 2, only={0})
    ranks.agent.wait(RankHello, generation=1, rank=0)
    threading.Event().wait(wait_s)
    parked = held(ranks, "abort", generation=1, of=(0,))
    assert parked[0].iteration == -1
    ranks.launch(spec, 1, generation=2, kept={0: (1, 0)})
    reached(ranks, 0, generation=2)


def test_a_survivor_that_is_drained_while_it_meets_the_others_keeps_its_state(ranks) -> None:
    """What it has may be nowhere else: it parks, and saves its replica when it is asked to."""
    spec = job("pulled", train_iters=1000)
    ranks.launch(spec, 2)
    reached(ranks, 1)
    parked = held(ranks, "abort", generation=1, of=(0, 1))
    ranks.launch(spec, 3, generation=2, only={0}, kept={0: (1, 0)})
    ranks.agent.order(2, 0, "drain")
    _, again = ranks.agent.wait(RankParked, generation=2, rank=0)
    assert again.iteration == parked[0].iteration
    ranks.agent.order(2, 0, "save_replica")
    _, saved = ranks.agent.wait(RankDrained, generation=2, rank=0)
    assert saved.iteration == parked[0].iteration
    assert saved.manifest is not None


def test_an_order_that_does_not_fit_is_refused_and_one_that_comes_twice_is_answered_twice(ranks) -> None:
    ranks.launch(job("orders", train_iters=1000), 1)
    reached(ranks, 0)
    ranks.agent.order(1, 0, "assign", environment={"RANK": "7"})
    ranks.agent.order(1, 0, "quit")
    now = ranks.agent.all(Progress, generation=1, rank=0)[-1].iteration
    reached(ranks, now + 2)
    held(ranks, "park", generation=1, of=(0,))
    ranks.agent.order(1, 0, "abort")
    deadline = time.monotonic() + 60
    while len(ranks.agent.all(RankParked, generation=1, rank=0)) < 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    log = ranks.log_of("orders", 1, 0)
    assert "training: assign is ignored" in log
    assert "training: quit is ignored" in log


def test_a_finished_job_whose_last_checkpoint_cannot_be_saved_parks_on_abort_only(ranks) -> None:
    """The store is away at the end: a park is refused, since the job has ended, and an abort is obeyed."""
    spec = job("unsaved", train_iters=3)
    blocked = ranks.run_dir.parent / "store"
    blocked.rmdir()
    ranks.launch(spec, 2)
    for rank in (0, 1):
        reached(ranks, 2, rank=rank)
    ranks.agent.order(1, 0, "park")
    parked = held(ranks, "abort", generation=1, of=(0, 1))
    assert {p.iteration for p in parked.values()} == {2}
    assert ranks.agent.all(RankFinished, generation=1, rank=0) == []
    blocked.mkdir()
    ranks.launch(spec, 2, generation=2, kept={0: (1, 1), 1: (1, 0)})
    ranks.agent.wait(RankFinished, generation=2, rank=1)
    manifest, _ = CheckpointRepository(open_store(ranks.store_url), "unsaved").newest_complete()
    assert (manifest.iteration, manifest.generation) == (2, 2)
    assert check_ledger(ledger_directory(ranks.run_dir, "unsaved"), spec) == []


def test_the_log_of_a_rank_that_was_freed_is_short(ranks) -> None:
    """torch's C++ part would write a stack a connection."""
    ranks.launch(job("short"), 2, only={0})
    ranks.agent.wait(RankHello, generation=1, rank=0)
    threading.Event().wait(0.5)
    held(ranks, "abort", generation=1, of=(0,))
    assert "frame #" not in ranks.log_of("short", 1, 0)
