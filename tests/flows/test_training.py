"""A train run submits its job once, and adopts what is there."""

import pytest

from flows.training import _submit
from unicron_lib.domain.events import JobCancelled
from unicron_lib.domain.jobs import JobSpec, JobStatus
from unicron_lib.errors import UserError


async def test_a_run_finds_the_submission_that_the_command_journalled(site):
    spec = site.journal.state.jobs["gpt-a"].spec
    assert await _submit(spec, submission="1") == "1"
    assert len([e for e in site.journal.entries() if e.event.type == "job_submitted"]) == 1


async def test_a_run_that_starts_after_its_job_was_cancelled_submits_nothing(site):
    spec = site.journal.state.jobs["gpt-a"].spec
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    assert await _submit(spec, submission="1") == "1"
    assert site.journal.refresh().jobs["gpt-a"].status is JobStatus.CANCELLED


async def test_another_run_of_the_same_job_adopts_it(site):
    spec = site.journal.state.jobs["gpt-a"].spec
    assert await _submit(spec, submission="2") == "1"


async def test_another_job_of_the_same_name_is_refused(site):
    with pytest.raises(UserError, match="the name gpt-a is taken"):
        await _submit(JobSpec(job="gpt-a", seed=99), submission="2")


async def test_a_name_is_free_again_when_its_job_has_ended(site):
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    assert await _submit(JobSpec(job="gpt-a", seed=99), submission="2") == "2"
    assert site.journal.state.jobs["gpt-a"].spec.seed == 99
