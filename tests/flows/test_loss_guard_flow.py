"""The train flow tells a spike of the loss; an anomaly takes its job back to before it, without the batches."""

import asyncio
import logging
import math

import pytest

from flows import training
from unicron_lib.agent.messages import LaunchRanks
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.controller.views import JobProgress
from unicron_lib.detection.loss_guard import Point
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import FailureDetected, LossSpiked
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import Layout, StepKind
from unicron_lib.errors import StoreError

CALM = [Point(iteration=i, loss=2.2 + 0.01 * math.sin(i), grad_norm=0.24) for i in range(100)]
HIGH = [Point(iteration=i, loss=5.0, grad_norm=100.0) for i in range(100, 160)]


def progress(curve, generation):
    return JobProgress(
        job="gpt-a",
        generation=generation,
        world_size=4,
        iteration=curve[-1].iteration,
        loss=curve[-1].loss,
        iteration_s=1.0,
        flops=1.0,
        at=1.0,
        first_iteration_at=1.0,
        iterations={},
        measured_flops={},
        curve=tuple(curve),
    )


def save(site, iteration):
    repository = CheckpointRepository(training.services().store, "gpt-a")
    generation = site.journal.state.jobs["gpt-a"].generation
    key = {"iteration": iteration, "generation": generation}
    shard = repository.put_shard(**key, save="all", rank=0, data=b"state", tensors=("param.0",))
    manifest = Manifest(job="gpt-a", **key, loss=1.0, consumed_samples=8, layout=Layout(dp=1), shards=(shard,))
    return repository.commit(manifest)


@pytest.fixture
def watched(site, monkeypatch):
    """The flow sees a curve until the journal has an event of that kind."""
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("flow"))

    async def watch(curve, kind):
        async def live():
            return (progress(curve, site.journal.state.jobs["gpt-a"].generation),)

        monkeypatch.setattr(training.services().controller, "progress", live, raising=False)
        for_ever = training._for_ever
        monkeypatch.setattr(training, "_for_ever", lambda look, pause_s: for_ever(look, 0.0))
        watching = asyncio.create_task(training._watch_loss("gpt-a"))
        try:
            async with asyncio.timeout(20):
                while not of(site, kind):  # noqa: ASYNC110 - a journal rings no bell
                    await asyncio.sleep(0.01)
        finally:
            watching.cancel()

    return watch


def of(site, kind):
    return [entry.event for entry in site.journal.entries() if isinstance(entry.event, kind)]


async def test_a_spike_is_journalled_once_and_nothing_is_done(site, watched):
    await watched(CALM + HIGH[:10], LossSpiked)
    (spiked,) = of(site, LossSpiked)
    assert (spiked.iteration, spiked.over) == (100, False)
    assert site.journal.state.jobs["gpt-a"].loss_spike == spiked.reason
    assert not site.journal.state.open_incidents


async def test_what_the_guard_said_once_outlives_an_outage_of_the_store(site, watched, monkeypatch):
    publish, failed = training.publish, []

    async def flaky(event):
        if len(failed) < 1:
            failed.append(event)
            raise StoreError("the store is away")
        return await publish(event)

    monkeypatch.setattr(training, "publish", flaky)
    monkeypatch.setattr(training, "LOOK_S", 0.0)
    await watched(CALM + HIGH, FailureDetected)
    assert failed
    assert len(of(site, LossSpiked)) == 1


async def test_a_spike_that_does_not_pass_takes_the_job_back(site, watched, monkeypatch):
    launched = []
    carry_out = site.agents.carry_out
    monkeypatch.setattr(site.agents, "carry_out", lambda node, command: launched.append(command) or carry_out(node, command))
    keys = {iteration: save(site, iteration) for iteration in (79, 99, 119, 139)}
    await watched(CALM + HIGH, FailureDetected)
    (incident,) = site.journal.state.open_incidents
    assert incident.kind == ErrorKind.LOSS_ANOMALY
    await site.respond()
    state = site.journal.state
    job = state.jobs["gpt-a"]
    assert (job.status, job.skipped, job.rolled_back_to) == (JobStatus.RUNNING, ((100, 100),), None)
    launches = [command for command in launched if isinstance(command, LaunchRanks)]
    assert {command.restore_from for command in launches} == {keys[99]}
    assert {command.skipped for command in launches} == {((100, 100),)}
    assert not any(command.type == "drain_ranks" for command in launched), "what the ranks have is worth nothing"
    plan = state.plans[state.incidents[incident.id].plan]
    (result,) = (plan.results[step.id] for step in plan.plan.steps if step.kind is StepKind.RESTORE)
    assert (result["iteration"], result["batches_left_out"]) == (99, "100")


async def test_a_job_without_a_checkpoint_from_before_is_stopped_and_not_begun_anew(site, watched):
    for iteration in (119, 139):
        save(site, iteration)
    await watched(CALM + HIGH, FailureDetected)
    await site.respond()
    job = site.journal.state.jobs["gpt-a"]
    assert job.status is JobStatus.FAILED
    assert "must go back to iteration 99 or before, but its oldest checkpoint is of iteration 119" in job.reason
    assert CheckpointRepository(training.services().store, "gpt-a").iterations() == [139, 119]


async def test_wrong_results_take_the_job_back_with_the_same_batches_and_without_the_node(site, monkeypatch):
    launched = []
    carry_out = site.agents.carry_out
    monkeypatch.setattr(
        site.agents, "carry_out", lambda node, command: launched.append((node, command)) or carry_out(node, command)
    )
    keys = {iteration: save(site, iteration) for iteration in (29, 39, 44)}
    held = site.journal.state.jobs["gpt-a"].assignment
    culprit = held.slots[0].node
    doubt = {"iteration": 39, "spoiled": (40, 49)}
    site.fail("peer", ErrorKind.NCCL_REMOTE_ERROR, rank=len(held.slots) - 1, node=held.slots[-1].node, **doubt)
    site.fail("culprit", ErrorKind.CUDA_ERROR, rank=0, node=culprit, verdict="exclude", **doubt)
    await site.respond()
    job = site.journal.state.jobs["gpt-a"]
    assert (job.status, job.skipped, job.rolled_back_to) == (JobStatus.RUNNING, (), None)
    assert site.journal.state.nodes[culprit].status is NodeStatus.QUARANTINED
    launches = [(node, command) for node, command in launched if isinstance(command, LaunchRanks)]
    assert {(command.restore_from, command.skipped) for _, command in launches} == {(keys[39], ())}
    assert {node for node, _ in launches} == set(held.nodes) - {culprit}
    assert not any(command.type in {"drain_ranks", "hold_ranks"} for _, command in launched)
