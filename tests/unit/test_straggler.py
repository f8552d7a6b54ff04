"""Who slows a job down: named with its node, in spite of jitter, and nobody else."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.detection.straggler import StragglerWatch, straggler_events
from unicron_lib.detection.windows import LATE, WINDOW, Windows


class Job:
    def __init__(self, ranks=4, sigma=0.02, lengths=(0.5, 1.0, 2.0)):
        self.random, self.ranks, self.sigma, self.lengths = random.Random(1), ranks, sigma, lengths
        self.watch, self.found = StragglerWatch(), []
        self.begin(1)

    def begin(self, generation):
        self.generation, self.iteration, self.windows = generation, 0, Windows()

    def run(self, iterations, *, slow=(), everybody=1.0):
        """`slow` are factors by rank."""
        factors = dict(slow)
        for _ in range(iterations):
            length = self.random.choice(self.lengths) * everybody
            parts = [length * factors.get(rank, 1.0) * self.random.lognormvariate(0, self.sigma) for rank in range(self.ranks)]
            for rank, part in enumerate(parts):
                self.windows.add(rank, self.iteration, compute_s=part, iteration_s=max(parts) + 0.05)
            self.iteration += 1
            self.found += self.watch.look(self.generation, self.windows.newest)
        return [(found.rank, found.over) for found in self.found]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_rank_is_named_within_three_windows_and_its_end_is_told(ranks):
    job = Job(ranks)
    assert job.run(20 * WINDOW) == []
    assert job.run(3 * WINDOW + LATE, slow={1: 1.2}.items()) == [(1, False)]
    assert job.found[0].ratio == pytest.approx(1.2, abs=0.05)
    assert job.run(30 * WINDOW, slow={1: 1.2}.items()) == [(1, False)]
    assert job.run(4 * WINDOW) == [(1, False), (1, True)]


def test_five_percent_are_no_straggler():
    assert Job().run(100 * WINDOW, slow={2: 1.05}.items()) == []


def test_a_job_that_gets_slower_as_a_whole_is_told_without_a_rank():
    job = Job(lengths=(1.0,))
    job.run(20 * WINDOW)
    assert job.run(4 * WINDOW, everybody=1.2) == [(None, False)]
    assert "no rank is slower" in job.found[0].reason
    assert job.run(40 * WINDOW) == [(None, False), (None, True)]


def test_a_new_generation_begins_anew():
    job = Job()
    job.run(20 * WINDOW, slow={1: 1.5}.items())
    job.begin(2)
    job.run(20 * WINDOW, slow={3: 1.5}.items())
    assert [found.rank for found in job.found] == [1, 3]


def test_the_events_name_the_node_and_are_the_same_whoever_finds_them():
    job = Job()
    job.run(20 * WINDOW, slow={1: 1.5}.items())
    window = job.windows.newest
    keys = {"job": "a", "generation": 1, "nodes": {1: "node-7"}}
    (event,) = straggler_events(tuple(job.found), window, **keys, now=5.0)
    (again,) = straggler_events(tuple(job.found), window, **keys, now=9.0)
    assert (event.rank, event.node, event.id) == (1, "node-7", again.id)
    assert event.reason.startswith("rank 1 needs 1.")


def test_a_window_is_looked_at_once_and_an_old_generation_not_at_all():
    job = Job()
    job.run(3 * WINDOW)
    before = job.watch.look(1, job.windows.newest)
    assert before == ()
    job.watch.look(2, None)
    assert job.watch.look(1, job.windows.newest) == ()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 10**6), st.floats(allow_nan=True, allow_infinity=True), st.floats(-1.0, 1e6)
        ),
        max_size=200,
    )
)
def test_whatever_is_reported_memory_stays_bounded_and_numbers_finite(reports):
    windows = Windows()
    for rank, iteration, compute_s, iteration_s in reports:
        windows.add(rank, iteration, compute_s=compute_s, iteration_s=iteration_s)
        assert len(windows._iterations) <= 2 * WINDOW + LATE
        if windows.newest:
            values = [*windows.newest.excess.values(), windows.newest.spread, windows.newest.iteration_s]
            assert all(math.isfinite(value) for value in values)


def test_reports_that_are_late_or_missing_cost_only_themselves():
    windows = Windows()
    for iteration in range(WINDOW + LATE + 1):
        for rank in range(3):
            if (rank, iteration) != (2, 5):
                windows.add(rank, iteration, compute_s=1.0 + 0.5 * (rank == 1), iteration_s=2.0)
    windows.add(2, 5, compute_s=99.0, iteration_s=99.0)
    window = windows.newest
    assert (window.first, window.iteration_s) == (0, pytest.approx(2.0))
    assert window.excess[1] == pytest.approx(math.log(1.5))
    assert window.compute_s == {0: 1.0, 1: 1.5, 2: 1.0}
