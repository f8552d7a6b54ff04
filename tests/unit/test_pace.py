"""When a rank stands still, and when it does not."""

import random
from dataclasses import fields

import pytest

from unicron_lib.detection.pace import FLOOR_S, KEPT, STILL_SHARE, WARM_UP, YOUNG, Baseline, Beat, Pace, Resumed, Stalled
from unicron_lib.detection.sections import DEFAULT_LIMITS_S, INSIDE, PAUSES, Limits, Section
from unicron_lib.domain.jobs import JobSpec


class Rank:
    """A rank that is looked at ten times a second of its own time."""

    def __init__(self, limits=None, **own):
        self.pace = Pace(limits or Limits(**own))
        self.now, self.at, self.marks, self.iteration, self.iteration_s = 0.0, 0.0, 1, -1, 0.0
        self.section = Section.SETUP
        self.found = []

    def mark(self, section):
        self.section, self.at, self.marks = section, self.now, self.marks + 1

    def look(self):
        beat = Beat(iteration=self.iteration, section=self.section, marks=self.marks, at=self.at, iteration_s=self.iteration_s)
        if found := self.pace.look(beat, self.now):
            self.found.append(found)
        return found

    def spend(self, seconds, section):
        self.mark(section)
        self.wait(seconds)

    def wait(self, seconds):
        end = self.now + seconds
        while self.now + 0.1 < end:
            self.now += 0.1
            self.look()
        self.now = end
        self.look()

    def iterate(self, seconds, count=1):
        for _ in range(count):
            self.spend(0.9 * seconds, Section.STEP)
            self.spend(0.1 * seconds, Section.COLLECTIVE)
            self.iteration, self.iteration_s = self.iteration + 1, seconds
            self.mark(Section.STEP)
            self.look()


def warm(seconds=1.0, count=YOUNG + 1, **limits):
    rank = Rank(**limits)
    rank.iterate(seconds, count)
    assert rank.found == []
    return rank


def test_a_stopped_rank_is_stalled_after_three_usual_iterations_and_told_once():
    """PB23, run 1: within three times the average and one look."""
    rank = warm(0.2, 21)
    stopped_at = rank.now
    rank.wait(60.0)
    (stalled,) = rank.found
    assert isinstance(stalled, Stalled)
    assert (stalled.section, stalled.iteration) == (Section.STEP, 20)
    assert stalled.limit_s == pytest.approx(0.6)
    assert stalled.usual_s == pytest.approx(0.2)
    assert stalled.silent_s <= 0.6 + 0.1 + 1e-6
    assert rank.now - stopped_at == pytest.approx(60.0)


def test_only_the_signs_of_the_rank_itself_are_evidence():
    """PB03: how busy a GPU is, or whether it can be asked at all, is not even known here."""
    assert {field.name for field in fields(Beat)} == {"iteration", "section", "marks", "at", "iteration_s", "pause"}


def test_a_rank_that_goes_on_by_itself_is_told_to_have_resumed():
    """PB23, run 2."""
    rank = warm(0.2, 21)
    rank.wait(2.0)
    rank.iterate(0.2, 20)
    stalled, resumed = rank.found
    assert isinstance(stalled, Stalled)
    assert isinstance(resumed, Resumed)
    assert resumed.silent_s == pytest.approx(2.0, abs=0.3)


def test_the_first_iteration_an_evaluation_and_a_checkpoint_are_no_hangs_but_a_hang_after_them_is():
    """PB25."""
    rank = Rank()
    rank.iterate(6.0)
    for number in range(1, 201):
        rank.iterate(0.1)
        if number % 50 == 0:
            rank.spend(4.0, Section.EVAL)
        if number % 100 == 0:
            rank.spend(5.0, Section.CHECKPOINT)
    assert rank.found == []
    rank.mark(Section.STEP)
    rank.wait(10.0)
    (stalled,) = rank.found
    assert stalled.silent_s <= FLOOR_S + 0.1 + 1e-6


@pytest.mark.parametrize(("section", "limit_s"), DEFAULT_LIMITS_S.items())
def test_other_sections_have_their_own_limits(section, limit_s):
    rank = warm()
    rank.spend(limit_s, section)
    assert rank.found == []
    rank.wait(1.0)
    assert [found.section for found in rank.found] == [section]


@pytest.mark.parametrize("section", [Section.PARKED, Section.DRAINING])
def test_a_parked_or_draining_rank_is_never_judged(section):
    rank = warm()
    rank.spend(100_000.0, section)
    assert rank.found == []


def test_before_it_is_warm_only_the_limit_of_the_setup_counts():
    rank = Rank()
    rank.iterate(1.0, WARM_UP)
    rank.spend(599.0, Section.STEP)
    assert rank.found == []
    rank.wait(2.0)
    assert len(rank.found) == 1


def test_the_owner_of_a_job_may_set_the_limits():
    spec = JobSpec(job="a", hang_factor=5.0, hang_patience_s=1.0, section_timeouts_s={"step": 7.0, "eval": 9.0})
    limits = Limits.of(spec)
    assert (limits.hang_factor, limits.patience_s, limits.step_s) == (5.0, 1.0, 7.0)
    most_s = INSIDE * 60.0 * spec.distributed_timeout_minutes
    assert limits.fixed_s == {Section.SETUP: most_s, Section.EVAL: 9.0, Section.CHECKPOINT: most_s}
    assert warm(step_s=7.0).pace.limit_s(Section.COLLECTIVE) == 7.0
    assert warm(hang_factor=5.0).pace.limit_s(Section.STEP) == pytest.approx(5.0)


def test_the_first_iteration_is_not_held_to_the_limit_of_a_step():
    """Kernels are compiled and connections made in it: it may take as long as the setup."""
    rank = Rank(step_s=7.0)
    rank.spend(599.0, Section.STEP)
    rank.iterate(300.0)
    assert rank.found == []
    rank.spend(7.2, Section.STEP)
    assert [found.limit_s for found in rank.found] == [7.0]


def test_a_limit_of_the_step_beyond_that_of_the_setup_counts_in_the_first_iteration_too():
    assert Pace(Limits(step_s=700.0)).limit_s(Section.STEP) == 700.0


@pytest.mark.parametrize("pause", sorted(PAUSES))
def test_who_waits_after_a_pause_waits_as_long_as_others_may_be_in_it(pause):
    pace = warm().pace
    assert pace.limit_s(Section.COLLECTIVE, pause) == DEFAULT_LIMITS_S[pause]
    assert pace.limit_s(Section.STEP, pause) == pace.limit_s(Section.COLLECTIVE) == pytest.approx(3.0)


def test_a_watcher_that_was_blind_starts_the_clocks_anew():
    rank = warm()
    rank.now += 1000.0
    rank.pace.restart_clock(rank.now)
    rank.look()
    assert rank.found == []
    rank.wait(3.2)
    assert [type(found) for found in rank.found] == [Stalled]


def still(rank, seconds, still_s):
    """Silence in its own part, of which it is known that nothing has been done for its last `still_s`."""
    rank.mark(Section.STEP)
    beat = Beat(iteration=rank.iteration, section=rank.section, marks=rank.marks, at=rank.at, iteration_s=rank.iteration_s)
    return rank.pace.look(beat, rank.now + seconds, still_s=still_s)


def scattered(**limits):
    """Iterations of x0.5 to x2: long ones take more than three times the mean."""
    rank = Rank(**limits)
    for number in range(200):
        rank.iterate((0.5, 0.5, 1.0, 2.0)[number % 4])
    assert rank.found == []
    assert rank.pace.limit_s(Section.STEP) > 3.2
    return rank


def test_who_stands_still_is_told_within_three_times_the_mean_also_where_iterations_scatter():
    found = still(scattered(), 3.0, still_s=1.1)
    assert isinstance(found, Stalled)
    assert found.limit_s == pytest.approx(3.0 * STILL_SHARE, rel=0.01)
    assert found.still_s == 1.1


def test_who_works_or_has_just_stopped_to_is_given_the_time_of_a_long_iteration():
    for still_s in (0.0, 0.9):
        assert still(scattered(), 3.1, still_s=still_s) is None


def test_a_short_silence_is_no_hang_however_still_it_is():
    assert still(scattered(), 3.0 * STILL_SHARE - 0.01, still_s=2.6) is None


def test_a_limit_that_the_owner_has_set_counts_alone():
    assert still(scattered(step_s=20.0), 19.0, still_s=19.0) is None


def test_who_waits_for_ranks_in_a_pause_is_not_called_still():
    rank = scattered()
    rank.mark(Section.COLLECTIVE)
    beat = Beat(iteration=rank.iteration, section=rank.section, marks=rank.marks, at=rank.at, pause=Section.EVAL)
    assert not rank.pace.is_doubtful(beat, rank.now + 100.0)
    assert rank.pace.look(beat, rank.now + 100.0, still_s=100.0) is None


def test_a_rank_is_looked_at_from_half_of_the_limit_on():
    rank = scattered()
    rank.mark(Section.STEP)
    beat = Beat(iteration=rank.iteration, section=rank.section, marks=rank.marks, at=rank.at)
    half = 1.5 * STILL_SHARE
    assert [rank.pace.is_doubtful(beat, rank.now + seconds) for seconds in (half - 0.01, half + 0.01)] == [False, True]


def test_long_iterations_that_were_not_there_at_first_are_learned_though_they_are_never_in_a_row():
    rank = warm(0.5, YOUNG + 1)
    for _ in range(50):
        rank.iterate(0.5, 4)
        rank.iterate(3.0)
    assert len([found for found in rank.found if isinstance(found, Stalled)]) <= WARM_UP
    assert rank.pace.usual_s == pytest.approx(0.5)


def test_a_new_pace_is_learned_after_a_few_iterations_that_look_like_stalls():
    rank = warm(1.0, 100)
    rank.iterate(5.0, WARM_UP + 1)
    told = len(rank.found)
    assert told > 0
    rank.iterate(5.0, 100)
    assert len(rank.found) == told
    assert rank.pace.usual_s == pytest.approx(5.0)


def test_one_long_iteration_does_not_move_the_baseline():
    rank = warm(1.0, 100)
    rank.iterate(50.0)
    assert rank.pace.limit_s(Section.STEP) == pytest.approx(3.0)


def test_what_varies_gets_a_wider_limit_and_what_does_not_gets_three_times_the_usual():
    draw = random.Random(1)
    quiet, lengths = Baseline(), Baseline()
    for _ in range(2 * KEPT):
        quiet.add(draw.lognormvariate(0.0, 0.1))
        lengths.add(draw.choice((0.5, 1.0, 2.0)) * draw.lognormvariate(0.0, 0.1))
    assert len(quiet) == KEPT
    assert quiet.limit_s(3.0) == pytest.approx(3.0 * quiet.median_s)
    assert 2 * 2.0 < lengths.limit_s(3.0) < 3.5 * 2.0


def test_a_hang_in_long_iterations_is_found_before_the_collectives_of_those_that_wait_give_up():
    """PB24, for limits that are learned. Iterations that take longer than that are believed all the same."""
    limits = Limits.of(JobSpec(job="a"))
    assert limits.most_s == INSIDE * 600.0
    rank = warm(250.0, limits=limits)
    assert rank.pace.limit_s(Section.STEP) == limits.most_s
    assert warm(500.0, limits=limits).pace.limit_s(Section.STEP) == pytest.approx(1.25 * 500.0)


def test_a_young_baseline_is_twice_as_wide():
    baseline = Baseline()
    for count in range(1, YOUNG + 1):
        baseline.add(1.0)
        assert baseline.limit_s(3.0) == pytest.approx(6.0 if count < YOUNG else 3.0)
