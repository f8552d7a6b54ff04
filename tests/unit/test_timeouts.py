"""PB24: an outer limit that ends before an inner one is refused, with both keys and the rule."""

import pytest

from unicron_lib.detection.sections import PACED, Limits, Section
from unicron_lib.domain.jobs import SECTIONS, JobSpec


@pytest.mark.parametrize(
    "keys",
    [{"section_timeouts_s": {"step": 60.0}}, {"section_timeouts_s": {"step": 30.0}}, {"hang_patience_s": 30.0}],
    ids=str,
)
def test_what_finds_a_hang_must_be_faster_than_the_collectives_timeout(keys):
    with pytest.raises(ValueError, match="job 'a': ") as refused:
        JobSpec(job="a", distributed_timeout_minutes=0.5, **keys)
    message = str(refused.value)
    assert next(iter(keys)) in message
    assert "must be less than distributed_timeout_minutes, 0.5 minutes" in message


def test_the_right_order_is_accepted():
    spec = JobSpec(job="a", distributed_timeout_minutes=1.0, section_timeouts_s={"step": 30.0, "eval": 7200.0})
    assert Limits.of(spec).step_s == 30.0


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
