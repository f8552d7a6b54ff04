"""How long a transition waits for the first iteration of what it has launched."""

from dataclasses import replace

import pytest

from tasks import transition
from tasks.sending import StepFailed
from tasks.transition import carry_out
from unicron_lib.domain.events import JobCancelled, JobSubmitted
from unicron_lib.domain.plans import StepKind


def resuming(site):
    """The newest plan, and its step that waits."""
    plan = list(site.journal.refresh().plans.values())[-1].plan
    return plan, next(step for step in plan.steps if step.kind is StepKind.RESUME)


async def test_the_job_has_the_last_word(site, monkeypatch):
    """PB24: what allows a long setup, and what gives up before it is over, are not two people's business."""
    usual = transition.services()
    hasty = replace(usual, settings=replace(usual.settings, first_iteration_s=1e-9))
    monkeypatch.setattr(transition, "services", lambda: hasty)
    with pytest.raises(StepFailed, match="gpt-a made no iteration within 0 s of its launch"):
        await carry_out.fn(*resuming(site))
    monkeypatch.setattr(transition, "services", lambda: usual)
    spec = site.journal.state.jobs["gpt-a"].spec
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    await site.respond()
    patient = replace(spec, section_timeouts_s={"setup": 400.0})
    site.journal.append(JobSubmitted(id="s2", at=1.0, submission="2", spec=patient))
    await site.respond()
    monkeypatch.setattr(transition, "services", lambda: hasty)
    result = await carry_out.fn(*resuming(site))
    assert result["iteration"] == 8
