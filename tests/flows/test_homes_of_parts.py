"""A job whose replicas are two ranks: who saves what is in the memory of parked ranks, and what that comes to."""

import pytest
from fake_site import submit_anew

from unicron_lib.agent.messages import Reply
from unicron_lib.domain.events import JobCancelled
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout, StepKind


@pytest.fixture
async def cut(site, monkeypatch):
    """The site's job, submitted anew with two ranks a replica, a replica a node; all its ranks park when they are asked to."""
    before = site.journal.state.jobs["gpt-a"].spec
    spec = JobSpec(job="gpt-a", min_gpus=2, tensor_model_parallel_size=2, throughput_flops=before.throughput_flops)
    await submit_anew(site, spec, monkeypatch)
    assert site.journal.refresh().jobs["gpt-a"].assignment.layout == Layout(tp=2, dp=2)
    return site


def drained(site):
    plan = list(site.journal.refresh().plans.values())[-1]
    return next(plan.results[step.id] for step in plan.plan.steps if step.kind is StepKind.DRAIN)


def saved_by(site) -> list[int]:
    return [int(step.rpartition("-")[2]) for kind, step in site.agents.effects if kind == "save_replica"]


async def cancel(site) -> None:
    site.journal.append(JobCancelled(id="c2", at=2.0, job="gpt-a", submission="2"))
    await site.respond()


async def test_the_ranks_of_one_replica_save_their_parts_and_the_first_one_comes_last(cut) -> None:
    await cancel(cut)
    assert saved_by(cut) == [1, 0]
    assert drained(cut)["source"] == "replica of rank 0 at node-1"


async def test_when_one_cannot_the_other_replica_saves(cut) -> None:
    usual = cut.agents.carry_out

    def carry_out(node, command):
        if command.type == "save_replica" and command.rank == 1:
            return Reply(step=command.step, ok=False, error="it died")
        return usual(node, command)

    cut.agents.carry_out = carry_out
    await cancel(cut)
    assert saved_by(cut) == [3, 2]
    assert drained(cut)["source"] == "replica of rank 2 at node-2"
