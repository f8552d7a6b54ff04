"""Ranks on two nodes, each with a watch that sees its own page only: who waits for a peer's pause does not stand still."""

import pytest

from unicron_lib.agent.beats import BeatReader, BeatWriter, beat_path
from unicron_lib.agent.messages import RankStalled
from unicron_lib.agent.pace_watch import LOOK_S, PaceWatch
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.detection.pace import YOUNG
from unicron_lib.detection.sections import PAUSES, Limits, Section

PATIENT = Limits()


class TwoNodes:
    """Rank n on node n; they keep step. The clock is ours."""

    def __init__(self, tmp_path, monkeypatch):
        self.now, self.told = 1000.0, {0: [], 1: []}
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * 1e9))
        self.pages, self.watches = zip(*(self._node(tmp_path / f"n{rank}", rank) for rank in range(2)), strict=True)
        self.iteration = -1

    def _node(self, directory, rank):
        (directory / "beats").mkdir(parents=True)
        ranks = Ranks()
        ranks.add(Rank(job="a", generation=1, rank=rank, gpu=0, limits=PATIENT))
        page = BeatWriter(beat_path(directory, "a", 1, rank))
        return page, PaceWatch(ranks=ranks, directory=directory, tell=self.told[rank].append)

    def wait(self, seconds):
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            for watch in self.watches:
                watch.look(now=self.now)

    def mark(self, section):
        for page in self.pages:
            page.mark(section)

    def iterate(self, count=1):
        for _ in range(count):
            self.mark(Section.STEP)
            self.wait(0.4)
            self.mark(Section.COLLECTIVE)
            self.wait(0.1)
            self.complete()

    def complete(self):
        self.iteration += 1
        for page in self.pages:
            page.complete(self.iteration, 0.5)

    def pause(self, section, seconds):
        """Rank 1 is through at once and comes to wait in the next all-reduce; rank 0 takes its time."""
        self.mark(section)
        self.wait(0.1)
        self.pages[1].mark(Section.STEP)
        self.wait(0.4)
        self.pages[1].mark(Section.COLLECTIVE)
        self.wait(seconds)

    @property
    def stalls(self):
        return {(rank, told.section) for rank in self.told for told in self.told[rank] if isinstance(told, RankStalled)}


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    nodes = TwoNodes(tmp_path, monkeypatch)
    nodes.iterate(YOUNG + 2)
    assert nodes.stalls == set()
    return nodes


@pytest.mark.parametrize("section", sorted(PAUSES))
def test_who_waits_for_a_peer_on_another_node_that_saves_or_evaluates_does_not_stand_still(nodes, section):
    nodes.pause(section, 60.0)
    nodes.pages[0].mark(Section.STEP)
    nodes.wait(0.4)
    nodes.pages[0].mark(Section.COLLECTIVE)
    nodes.complete()
    nodes.iterate(3)
    assert nodes.stalls == set()


def test_a_rank_that_hangs_after_its_pause_is_found_as_soon_as_ever(nodes):
    """Only waiting for it is allowed to take longer."""
    nodes.pause(Section.CHECKPOINT, 2.0)
    nodes.pages[0].mark(Section.STEP)
    nodes.wait(3 * 0.5 + 2 * LOOK_S)
    assert nodes.stalls == {(0, "step")}


def test_a_rank_that_never_leaves_its_pause_is_found_and_so_is_who_waits_for_it(nodes):
    nodes.pause(Section.CHECKPOINT, PATIENT.fixed_s[Section.CHECKPOINT] + 1.0)
    assert nodes.stalls == {(0, "checkpoint"), (1, "collective")}


def test_one_iteration_later_waiting_is_judged_by_the_usual_pace_again(nodes):
    nodes.pause(Section.CHECKPOINT, 1.0)
    nodes.pages[0].mark(Section.COLLECTIVE)
    nodes.complete()
    nodes.mark(Section.STEP)
    nodes.pages[1].mark(Section.COLLECTIVE)
    nodes.wait(3 * 0.5 + 2 * LOOK_S)
    assert nodes.stalls == {(0, "step"), (1, "collective")}


def test_a_page_tells_of_a_pause_until_the_next_iteration_is_complete(tmp_path):
    writer = BeatWriter(tmp_path / "page")
    reader, seen = BeatReader(tmp_path / "page"), []
    for section in (Section.STEP, Section.EVAL, Section.CHECKPOINT, Section.STEP, Section.COLLECTIVE):
        writer.mark(section)
        seen.append(reader.read().pause)
    assert seen == [None, Section.EVAL, Section.CHECKPOINT, Section.CHECKPOINT, Section.CHECKPOINT]
    writer.complete(0, 1.0)
    writer.mark(Section.STEP)
    assert reader.read().pause is None
