"""PB24: an outer limit that ends before an inner one is refused, with both keys and the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.transition import first_iteration_s
from unicron_lib.detection.sections import DEFAULT_LIMITS_S, PACED, Limits, Section
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.timeout_checks import SECTIONS


@pytest.mark.parametrize(
    "keys",
    [{"hang_patience_s": 30.0}, *({"section_timeouts_s": {name: limit_s}} for name in SECTIONS for limit_s in (30.0, 60.0))],
    ids=str,
)
def test_what_finds_a_hang_must_be_faster_than_the_collectives_timeout(keys):
    with pytest.raises(ValueError, match="job 'a': ") as refused:
        JobSpec(job="a", distributed_timeout_minutes=0.5, **keys)
    message = str(refused.value)
    assert next(iter(keys)) in message
    assert all(name in message for name in keys.get("section_timeouts_s", ()))
    assert "must be less than distributed_timeout_minutes, 0.5 minutes" in message


def test_the_right_order_is_accepted():
    spec = JobSpec(job="a", distributed_timeout_minutes=121.0, section_timeouts_s={"step": 30.0, "eval": 7200.0})
    limits = Limits.of(spec)
    assert (limits.step_s, limits.fixed_s[Section.EVAL]) == (30.0, 7200.0)


@given(minutes=st.floats(0.1, 1e4))
def test_what_nobody_has_set_is_in_the_right_order(minutes):
    """Who waits for a rank in any section is still waiting when that rank is found to stand still."""
    limits = Limits.of(JobSpec(job="a", hang_patience_s=0.0, distributed_timeout_minutes=minutes))
    assert max(*limits.fixed_s.values(), limits.unlearned_s) < 60.0 * minutes
    assert all(limit_s <= DEFAULT_LIMITS_S[section] for section, limit_s in limits.fixed_s.items())


def test_a_transition_waits_for_the_first_iteration_as_long_as_the_job_may_take_to_it():
    """Waiting is given up only when a rank that stands still has been told."""
    slow = JobSpec(job="a", distributed_timeout_minutes=60.0, section_timeouts_s={"setup": 900.0})
    assert first_iteration_s(slow, 180.0) == 2 * 900.0 + slow.hang_patience_s
    slower = JobSpec(job="a", distributed_timeout_minutes=60.0, section_timeouts_s={"setup": 900.0, "step": 1000.0})
    assert first_iteration_s(slower, 180.0) == 900.0 + 1000.0 + slow.hang_patience_s
    assert first_iteration_s(slow, 3600.0) == 3600.0
    assert first_iteration_s(JobSpec(job="a"), 180.0) == 180.0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"section_timeouts_s": {"sleep": 1.0}}, "sleep; the sections are setup, step, eval, checkpoint"),
        ({"section_timeouts_s": {"eval": 0.0}}, "section_timeouts_s of eval"),
        ({"section_timeouts_s": {"eval": -1.0}}, "section_timeouts_s of eval"),
        ({"section_timeouts_s": {"eval": float("nan")}}, "section_timeouts_s of eval"),
        ({"section_timeouts_s": {"step": float("inf")}}, "section_timeouts_s of step"),
        ({"hang_factor": 1.0}, "hang_factor"),
        ({"hang_factor": float("nan")}, "hang_factor"),
        ({"hang_patience_s": -1.0}, "hang_patience_s"),
        ({"hang_patience_s": float("inf")}, "hang_patience_s"),
        ({"distributed_timeout_minutes": 0.0}, "distributed_timeout_minutes"),
        ({"distributed_timeout_minutes": float("inf")}, "distributed_timeout_minutes"),
        ({"restart_window_s": -1.0}, "restart_window_s"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(keys, named):
    with pytest.raises(ValueError, match=named):
        JobSpec(job="a", **keys)


def test_every_section_that_can_be_set_is_one():
    """All that are judged can be set, except waiting for others, which goes with the step."""
    judged = PACED | set(Limits().fixed_s)
    assert {Section(name) for name in SECTIONS} == judged - {Section.COLLECTIVE}
