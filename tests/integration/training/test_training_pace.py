"""Real ranks give signs of life: who stands still is named, who works is left alone."""

import signal
import threading
import time
from collections.abc import Callable

import pytest
from training_jobs import tiny

from unicron_lib.agent.beats import BeatReader, beat_path
from unicron_lib.agent.messages import RankResumed, RankStalled
from unicron_lib.agent.pace_watch import LOOK_S, PaceWatch
from unicron_lib.agent.rank_messages import Progress, RankFinished
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.detection.pace import YOUNG
from unicron_lib.detection.sections import Limits, Section
from unicron_lib.training.loop import Work

PACE_S = 0.2
DEADLINE_S = 60.0


class Watcher:
    """An agent's watch over the ranks of a job, in a thread of the test."""

    def __init__(self, ranks, spec, world_size):
        table = Ranks()
        for rank in range(world_size):
            table.add(Rank(job=spec.job, generation=1, rank=rank, gpu=rank, limits=Limits.of(spec)))
        self.told: list[RankStalled | RankResumed] = []
        self.ranks, self.spec = ranks, spec
        self._watch = PaceWatch(ranks=table, directory=ranks.run_dir, tell=self.told.append)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self):
        while not self._stopping.wait(LOOK_S):
            self._watch.look(now=time.monotonic())

    def until(self, done: Callable[[], object], what: str):
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen, told: {self.told}"
            threading.Event().wait(0.01)

    def beat(self, rank):
        reader = BeatReader(beat_path(self.ranks.run_dir, self.spec.job, 1, rank))
        try:
            return reader.read()
        finally:
            reader.close()

    def stop_in(self, section, rank):
        """SIGSTOP the rank in that section, and see that it gives no more signs."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.ranks.stop(self.spec.job, 1, rank)
            beat = self.beat(rank)
            while (now := self.beat(rank)) == beat and beat and beat.section is section:
                if time.monotonic() - beat.at > 2 * PACE_S:
                    return
                threading.Event().wait(0.01)
            self.ranks.signal(self.spec.job, 1, rank, signal.SIGCONT)
            self.until(lambda stopped=now: self.beat(rank) != stopped, "another sign")
        raise AssertionError(f"rank {rank} is never stopped in section {section}: {now}")

    def named(self, kind):
        """Of which ranks that is the last word."""
        last = {body.rank: body for body in list(self.told)}
        return {rank: body for rank, body in last.items() if isinstance(body, kind)}

    def close(self):
        self._stopping.set()
        self._thread.join()


@pytest.fixture
def watch(ranks):
    watchers = []

    def start(spec, world_size):
        watchers.append(Watcher(ranks, spec, world_size))
        ranks.launch(spec, world_size)
        return watchers[-1]

    yield start
    for watcher in watchers:
        watcher.close()


def reached(ranks, iteration):
    ranks.agent.wait(Progress, generation=1, rank=0, when=lambda p: p.iteration >= iteration)


def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it_and_its_return_is_told(ranks, watch):
    """PB23, both runs: what is told names the culprit; when it goes on, that is told too."""
    spec = tiny(job="hung", train_iters=1000, pace_s=PACE_S, save_interval=1000)
    watcher = watch(spec, 3)
    reached(ranks, YOUNG + 4)
    watcher.stop_in(Section.STEP, rank=1)
    watcher.until(lambda: len(watcher.named(RankStalled)) == 3, "that all stand still")
    stalled = watcher.named(RankStalled)
    assert {rank: body.section for rank, body in stalled.items()} == {0: "collective", 1: "step", 2: "collective"}
    iterations = {body.iteration for body in stalled.values()}
    assert max(iterations) - min(iterations) <= 1  # whoever left the last collective first
    told = stalled[1]
    print(f"silent {told.silent_s:.3f} s, limit {told.limit_s:.3f} s, usual {told.usual_s:.3f} s")  # noqa: T201
    assert told.silent_s > told.limit_s >= 2.999 * told.usual_s > 0
    ranks.signal("hung", 1, 1, signal.SIGCONT)
    watcher.until(lambda: len(watcher.named(RankResumed)) == 3, "that all go on")
    reached(ranks, told.iteration + 2)


def test_a_checkpoint_that_takes_its_time_is_no_hang(ranks, watch):
    """PB25: the store is away when the last checkpoint is due; the ranks try again, for many times an iteration's length."""
    spec = tiny(job="saving", train_iters=YOUNG + 4, pace_s=0.05, save_interval=1000)
    blocked = ranks.run_dir.parent / "store"
    blocked.rmdir()
    watcher = watch(spec, 2)
    reached(ranks, YOUNG + 3)
    watcher.until(lambda: watcher.beat(0).section is Section.CHECKPOINT, "the last checkpoint")
    tried = watcher.beat(0).marks
    watcher.until(lambda: watcher.beat(0).marks > tried, "another attempt to save")
    blocked.mkdir()
    ranks.agent.wait(RankFinished, generation=1, rank=0)
    assert "checkpoint" not in {body.section for body in watcher.told if isinstance(body, RankStalled)}


def test_after_a_save_all_ranks_tell_that_others_may_still_be_in_it(ranks, watch):
    """Until the next iteration is complete: then none of them can be."""
    watcher = watch(tiny(job="pausing", train_iters=1000, pace_s=PACE_S, save_interval=4), 2)
    reached(ranks, 0)
    for rank in range(2):
        for pause in (None, Section.CHECKPOINT, None):
            watcher.until(
                lambda rank=rank, pause=pause: (beat := watcher.beat(rank)) and beat.iteration >= 0 and beat.pause is pause,
                f"pause {pause} of rank {rank}",
            )


def test_a_rank_ends_with_the_code_that_it_is_ordered_to_end_with(ranks, watch):
    watch(tiny(job="ending", train_iters=1000, pace_s=0.05, save_interval=1000), 2)
    reached(ranks, 2)
    ranks.agent.order(1, 1, "exit", amount=17.0)
    assert ranks.exit_code("ending", 1, 1) == 17


def test_a_slow_rank_takes_longer_for_its_own_part_until_it_is_told_otherwise(ranks, watch):
    watch(tiny(job="slow", train_iters=1000, pace_s=0.05, save_interval=1000), 2)
    reached(ranks, 3)
    ranks.agent.order(1, 1, "slow", amount=2.0)
    _, slow = ranks.agent.wait(Progress, generation=1, rank=1, when=lambda p: p.iteration > 3 and p.compute_s >= 0.1)
    ranks.agent.wait(Progress, generation=1, rank=1, when=lambda p: p.iteration >= slow.iteration + 5)
    later = [p for p in ranks.agent.all(Progress, generation=1, rank=1) if p.iteration > slow.iteration + 1]
    assert all(p.compute_s >= 0.1 for p in later)
    ranks.agent.order(1, 1, "slow", amount=1.0)
    ranks.agent.wait(Progress, generation=1, rank=1, when=lambda p: p.iteration > slow.iteration and p.compute_s < 0.1)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ranks_with_unequal_numbers_of_micro_batches_are_measured_alike(world_size):
    """8 micro-batches on 3 ranks: a rank that has 3 of them is not slower than one that has 2."""
    spec = tiny(global_batch_size=8)
    works = [Work(spec, replica=rank, num_replicas=world_size) for rank in range(world_size)]
    assert [work.fair_share * len(work.micro_batches) for work in works] == pytest.approx([8 / world_size] * world_size)
