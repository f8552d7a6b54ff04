"""The beat page between a rank and its agent, and the watch over all of a node's pages."""

import os
import struct
import subprocess
import sys
import time

import pytest

from unicron_lib.agent.beats import SIZE, BeatReader, BeatWriter, beat_path
from unicron_lib.agent.messages import NodeNotice, RankResumed, RankStalled
from unicron_lib.agent.pace_watch import BLIND_S, LOOK_S, PaceWatch, beat_directory
from unicron_lib.agent.ranks import Phase, Rank, Ranks
from unicron_lib.detection.pace import YOUNG
from unicron_lib.detection.sections import Limits, Section


def test_a_reader_sees_what_was_written(tmp_path):
    writer = BeatWriter(tmp_path / "page")
    reader = BeatReader(tmp_path / "page")
    first = reader.read()
    assert (first.iteration, first.section, first.marks, first.iteration_s) == (-1, Section.SETUP, 1, 0.0)
    writer.complete(7, 0.25)
    for section in Section:
        writer.mark(section)
        assert reader.read().section is section
    second = reader.read()
    assert (second.iteration, second.iteration_s, second.marks) == (7, 0.25, 1 + len(Section))
    assert second.at >= first.at
    reader.close()


def test_a_rank_that_was_stopped_while_it_wrote_is_seen_at_its_sign_before(tmp_path):
    writer, reader = BeatWriter(tmp_path / "page"), BeatReader(tmp_path / "page")
    before = reader.read()
    struct.pack_into("<Qq", writer._page, 0, 3, 99)
    assert reader.read() == before


def test_without_a_page_or_a_place_for_it_a_rank_works_all_the_same(tmp_path, caplog):
    BeatWriter.open(None).mark(Section.STEP)
    BeatWriter.open(tmp_path / "nowhere" / "page").mark(Section.STEP)
    assert "nobody sees whether this rank lives" in caplog.text


def test_a_page_that_is_not_there_yet_or_empty_or_garbage_is_no_sign(tmp_path):
    with pytest.raises(FileNotFoundError):
        BeatReader(tmp_path / "page")
    (tmp_path / "page").write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        BeatReader(tmp_path / "page")
    (tmp_path / "page").write_bytes(bytes(SIZE))
    assert BeatReader(tmp_path / "page").read() is None
    (tmp_path / "page").write_bytes(b"\xfe" * SIZE)
    assert BeatReader(tmp_path / "page").read() is None


WRITER = """
import sys
from pathlib import Path
from unicron_lib.agent.beats import BeatWriter
writer, number = BeatWriter(Path(sys.argv[1])), 0
while True:
    writer.complete(number, number / 1e6)
    writer.mark()
    number += 1
"""


def test_a_reader_never_sees_half_of_a_sign(tmp_path):
    """The parts of a sign belong together, while another process writes as fast as it can."""
    seen, deadline = set(), time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "page"]) as process:
        try:
            while not (tmp_path / "page").exists() or (tmp_path / "page").stat().st_size < SIZE:
                assert time.monotonic() < deadline
            reader = BeatReader(tmp_path / "page")
            while len(seen) < 5_000:
                assert time.monotonic() < deadline
                beat = reader.read()
                if beat and beat.iteration >= 0:
                    assert beat.iteration_s == pytest.approx(beat.iteration / 1e6, abs=2e-9)
                    assert beat.marks == beat.iteration + 2
                    seen.add(beat.iteration)
        finally:
            process.kill()


def test_the_directory_is_in_memory_and_gone_afterwards(tmp_path):
    with beat_directory(tmp_path):
        place = (tmp_path / "beats").resolve()
        BeatWriter(beat_path(tmp_path, "a", 1, 0))
        assert list(place.iterdir())
    assert not place.exists()


def test_a_directory_that_a_killed_agent_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("unicron_lib.agent.pace_watch.MEMORY", tmp_path)
    (tmp_path / "unicron-beats-old").mkdir()
    (tmp_path / "unicron-beats-new").mkdir()
    os.utime(tmp_path / "unicron-beats-old", (0, 0))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with beat_directory(tmp_path / "one"):
        held = (tmp_path / "one" / "beats").resolve()
        os.utime(held, (0, 0))
        with beat_directory(tmp_path / "two"):
            assert held.exists()
            assert not (tmp_path / "unicron-beats-old").exists()
            assert (tmp_path / "unicron-beats-new").exists()


class Node:
    """Two ranks whose pages are written by hand, and a watch whose clock is ours."""

    def __init__(self, tmp_path, monkeypatch, **watch):
        (tmp_path / "beats").mkdir()
        self.now, self.told, self.table = 1000.0, [], Ranks()
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * 1e9))
        self.watch = PaceWatch(ranks=self.table, directory=tmp_path, tell=self.told.append, **watch)
        self.directory = tmp_path
        self.pages = [self.add(number) for number in range(2)]

    def add(self, number, generation=1):
        self.table.add(Rank(job="a", generation=generation, rank=number, gpu=number, limits=Limits(patience_s=5.0)))
        return BeatWriter(beat_path(self.directory, "a", generation, number))

    def look(self):
        self.watch.look(now=self.now)

    def wait(self, seconds):
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.look()

    def iterate(self, count, seconds=1.0, first=0):
        for iteration in range(first, first + count):
            for page in self.pages:
                page.mark(Section.STEP)
            self.wait(0.8 * seconds)
            for page in self.pages:
                page.mark(Section.COLLECTIVE)
            self.wait(0.2 * seconds)
            for page in self.pages:
                page.complete(iteration, seconds)
                page.mark(Section.STEP)


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = Node(tmp_path, monkeypatch)
    node.iterate(YOUNG + 2)
    assert node.told == []
    return node


def test_the_rank_that_did_not_enter_the_collective_is_told_from_those_that_wait(node):
    node.pages[1].mark(Section.COLLECTIVE)
    node.wait(4.0)
    assert {(told.rank, told.section) for told in node.told} == {(0, "step"), (1, "collective")}
    first = node.told[0]
    assert isinstance(first, RankStalled)
    assert first.wait_s == pytest.approx(5.0 - first.silent_s)
    assert (first.iteration, first.usual_s) == (YOUNG + 1, pytest.approx(1.0))
    node.iterate(3)
    assert [type(told) for told in node.told] == [RankStalled, RankStalled, RankResumed, RankResumed]


def test_who_waits_for_a_peer_that_saves_or_evaluates_does_not_stand_still(node):
    node.pages[0].mark(Section.CHECKPOINT)
    node.pages[1].mark(Section.COLLECTIVE)
    node.wait(100.0)
    assert node.told == []
    node.pages[0].mark(Section.COLLECTIVE)
    node.wait(10.0)
    assert [(told.rank, told.section) for told in node.told] == [(1, "collective")]  # rank 0 may wait for another's pause


def test_an_agent_that_was_stopped_does_not_blame_the_ranks(node):
    """A pause of the whole machine, or of the agent alone: silence counts from its end."""
    node.now += 3600.0
    node.look()
    node.iterate(3)
    assert node.told == []
    node.now += BLIND_S / 2
    node.wait(10.0)
    assert {told.rank for told in node.told} == {0, 1}


def test_a_watch_that_is_always_late_still_finds_a_hang_and_tells_that_it_is_late(node):
    for _ in range(200):
        node.now += BLIND_S + 0.1
        node.look()
    notice, *stalls = node.told
    assert isinstance(notice, NodeNotice)
    assert (notice.code, notice.active) == ("monitor_blind", True)
    assert {told.rank for told in stalls} == {0, 1}
    assert max(told.silent_s for told in stalls) < 10.0
    node.iterate(70)
    (over,) = [told for told in node.told if isinstance(told, NodeNotice) and not told.active]
    assert over.code == "monitor_blind"


def test_a_pause_of_the_watch_excuses_no_more_than_itself(node):
    """A hang of 2 s and then a pause of 10 s is a hang of 2 s, not of none."""
    node.wait(2.0)
    assert node.told == []
    node.now += 10.0
    node.look()
    assert node.told == []
    node.wait(1.5)
    assert {told.rank for told in node.told} == {0, 1}, "beyond 3 s in all"


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
def test_a_rank_that_has_ended_or_parked_is_not_judged_and_its_page_goes(node, phase):
    for rank in node.table.alive:
        rank.phase = phase
    node.wait(100.0)
    assert node.told == []
    assert not list((node.directory / "beats").iterdir())


def test_a_new_generation_is_learned_anew(node):
    for rank in node.table.alive:
        rank.asked_to_stop = True
    node.pages = [node.add(number, generation=2) for number in range(2)]
    node.iterate(1, seconds=60.0)
    node.iterate(3, seconds=10.0)
    assert node.told == []
