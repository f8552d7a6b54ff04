"""A job that runs a command: how a failure, a planned change and its end are carried out."""

import pytest

from tasks.health import report
from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.domain.events import JobCancelled, JobSubmitted
from unicron_lib.domain.jobs import JobSpec, JobStatus
from unicron_lib.domain.plans import StepKind


@pytest.fixture
async def scripted(site):
    return await submitted(site)


@pytest.fixture
async def parking(site):
    return await submitted(site, parks=True)


async def submitted(site, **keys):
    """The site's job, submitted anew as a script on both nodes."""
    before = site.journal.state.jobs["gpt-a"].spec
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    await site.respond()
    spec = JobSpec(job="gpt-a", command=("python", "train.py"), throughput_flops=before.throughput_flops, **keys)
    site.journal.append(JobSubmitted(id="s2", at=1.0, submission="2", spec=spec))
    await site.respond()
    assert site.journal.refresh().jobs["gpt-a"].status is JobStatus.RUNNING
    site.agents.effects.clear()
    return site


def done(site, rank, generation):
    body = RankFinished(job="gpt-a", generation=generation, rank=rank, iteration=9, loss=1.0, whole_job=False)
    return Observation(node="n", boot="b", seq=100 * generation + rank, at=2.0, body=body)


async def test_after_a_failure_nothing_is_saved_and_all_ranks_are_started_again(scripted):
    scripted.fail("f1")
    await scripted.respond()
    kinds = [kind for kind, _ in scripted.agents.effects]
    assert "drain_ranks" not in kinds
    assert "hold_ranks" not in kinds
    assert kinds.index("stop_ranks") < kinds.index("open_rendezvous") < kinds.index("launch_ranks")
    job = scripted.journal.refresh().jobs["gpt-a"]
    assert (job.status, job.rolled_back_to) == (JobStatus.RUNNING, None)


async def test_after_a_failure_a_script_that_parks_lives_on(parking):
    before = parking.journal.state.jobs["gpt-a"].generation
    parking.fail("f1")
    await parking.respond()
    kinds = [kind for kind, _ in parking.agents.effects]
    assert kinds.index("hold_ranks") < kinds.index("stop_ranks") < kinds.index("launch_ranks")
    assert not {"drain_ranks", "save_replica"}.intersection(kinds)
    state = parking.journal.refresh()
    assert (state.jobs["gpt-a"].status, state.jobs["gpt-a"].generation) == (JobStatus.RUNNING, before + 1)
    results = {step.kind: it.results[step.id] for it in state.plans.values() for step in it.plan.steps if it.results}
    assert results[StepKind.DRAIN]["source"].startswith("memory of")
    assert results[StepKind.LAUNCH]["from"] == results[StepKind.DRAIN]["source"]


async def test_a_script_that_parks_and_loses_its_gpus_is_let_save(parking):
    parking.journal.append(JobCancelled(id="c2", at=2.0, job="gpt-a", submission="2"))
    await parking.respond()
    kinds = [kind for kind, _ in parking.agents.effects]
    assert kinds.index("drain_ranks") < kinds.index("stop_ranks")
    assert not {"hold_ranks", "save_replica"}.intersection(kinds)


async def test_a_planned_change_lets_the_script_save(scripted):
    scripted.journal.append(JobCancelled(id="c2", at=2.0, job="gpt-a", submission="2"))
    await scripted.respond()
    kinds = [kind for kind, _ in scripted.agents.effects]
    assert kinds.index("drain_ranks") < kinds.index("stop_ranks")
    assert "save_replica" not in kinds


async def test_the_job_is_finished_with_its_last_rank(scripted):
    job = scripted.journal.refresh().jobs["gpt-a"]
    for rank in range(job.gpus):
        assert scripted.journal.refresh().jobs["gpt-a"].status is JobStatus.RUNNING
        for _ in range(2):  # whoever reports may die before it has told that it did
            await report(done(scripted, rank, job.generation))
    ended = scripted.journal.refresh().jobs["gpt-a"]
    assert (ended.status, ended.iteration) == (JobStatus.FINISHED, 9)
    assert ended.reason == "its command has ended with exit code 0 on all ranks"


async def test_a_rank_that_ended_well_before_the_others_failed_starts_again_with_them(scripted):
    job = scripted.journal.refresh().jobs["gpt-a"]
    await report(done(scripted, 0, job.generation))
    scripted.fail("f2", iteration=8)
    await scripted.respond()
    newer = scripted.journal.refresh().jobs["gpt-a"]
    for rank in range(1, newer.gpus):
        await report(done(scripted, rank, newer.generation))
    assert scripted.journal.refresh().jobs["gpt-a"].status is JobStatus.RUNNING
    await report(done(scripted, 0, newer.generation))
    assert scripted.journal.refresh().jobs["gpt-a"].status is JobStatus.FINISHED
