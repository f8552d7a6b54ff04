"""Ranks that are silent and do nothing are told early, unless they may wait for one that works."""

import pytest
from test_beats import Node

from unicron_lib.agent.forks import Forked
from unicron_lib.agent.messages import RankStalled
from unicron_lib.agent.pace_watch import BLIND_S
from unicron_lib.detection.sections import Section
from unicron_lib.detection.stillness import Glimpse

EARLY_S, LATE_S = 3.0, 8.0
"""Three usual iterations, and more than the scatter of these allows; their limit lies between."""


class Processes:
    """Of which some work; GPUs, too."""

    def __init__(self):
        self.working, self.busy_gpus, self.seconds = set(), set(), 0.0

    def see(self, pid):
        self.seconds += 1.0
        return Glimpse(is_asleep=pid not in self.working, cpu_s=self.seconds if pid in self.working else 0.0)

    def is_gpu_idle(self, gpu, since):
        return gpu not in self.busy_gpus


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture
def node(tmp_path, monkeypatch, processes):
    """Two ranks, all of their job, whose iterations of 0.5 to 2 s have been seen."""
    node = Node(tmp_path, monkeypatch, see=processes.see, is_gpu_idle=processes.is_gpu_idle)
    for rank in node.table.alive:
        rank.world_size, rank.process = 2, Forked(name="rank", on_exit=print, pid=rank.rank, started=None)
    for number in range(80):
        node.iterate(1, seconds=(0.5, 0.5, 1.0, 2.0)[number % 4], first=number)
    assert node.told == []
    return node


def told(node):
    assert all(isinstance(it, RankStalled) for it in node.told)
    return {(it.rank, it.still_s > 0.0) for it in node.told}


def test_who_does_nothing_in_its_own_part_is_told_within_three_iterations_and_who_waits_for_it_too(node):
    node.pages[1].mark(Section.COLLECTIVE)
    node.wait(EARLY_S)
    assert told(node) == {(0, True), (1, True)}


def test_who_works_is_given_the_time_of_a_long_iteration_and_nobody_who_waits_for_it_is_blamed(node, processes):
    processes.working = {0}
    node.pages[1].mark(Section.COLLECTIVE)
    node.wait(EARLY_S)
    assert told(node) == set()
    node.wait(LATE_S)
    assert told(node) == {(0, False), (1, False)}


def test_a_busy_gpu_is_work(node, processes):
    processes.busy_gpus = {0}
    node.wait(EARLY_S)
    assert told(node) == {(1, True)}


def test_if_all_ranks_of_a_job_sleep_in_a_collective_nobody_can_come(node):
    for page in node.pages:
        page.mark(Section.COLLECTIVE)
    node.wait(EARLY_S)
    assert told(node) == {(0, True), (1, True)}


def test_somebody_elsewhere_may_still_come(node):
    for page, rank in zip(node.pages, node.table.alive, strict=True):
        rank.world_size = 3
        page.mark(Section.COLLECTIVE)
    node.wait(EARLY_S)
    assert told(node) == set()
    node.wait(LATE_S)
    assert told(node) == {(0, False), (1, False)}


def test_a_rank_that_needs_others_everywhere_is_not_blamed_for_one_that_works(node, processes):
    for rank in node.table.alive:
        rank.needs_peers = True
    processes.working = {0}
    node.wait(EARLY_S)
    assert told(node) == set()


def test_what_nobody_could_see_is_no_stillness(node, processes):
    """A watch that was held up begins to look anew."""
    node.wait(1.5)
    node.now += BLIND_S + 0.5
    node.look()
    node.wait(0.9)
    assert told(node) == set()
    node.wait(1.0)
    assert told(node) == {(0, True), (1, True)}
