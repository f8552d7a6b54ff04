"""The sequence that answers incidents, as plain functions: complete, repeatable, interruptible anywhere."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from flows.response import plain, respond
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import FailureDetected, JobCancelled, JobSubmitted, StepCompleted
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.domain.timeline import timing
from unicron_lib.errors import StoreError
from unicron_lib.journal import Journal


async def test_a_failure_is_answered_by_one_plan_and_closed(site):
    site.fail("f1")
    await site.respond()
    state = site.journal.state
    assert (state.jobs["gpt-a"].generation, state.jobs["gpt-a"].status) == (2, JobStatus.RUNNING)
    assert {i.status for i in state.incidents.values()} == {IncidentStatus.CLOSED}
    assert set(site.agents.running.values()) == {2}


async def test_two_processes_at_once_do_nothing_twice(site, monkeypatch):
    """The warm service and a worker's run of the same deployment race: same end, each effect once."""
    site.fail("f1")
    before = len(site.agents.effects)
    await asyncio.gather(site.respond(), site.respond(), site.respond())
    assert site.journal.refresh().jobs["gpt-a"].generation == 2
    effects = site.agents.effects[before:]
    assert len(effects) == len(set(effects))
    assert len(site.steps()) == len(set(site.steps()))


@pytest.mark.parametrize("line", range(1, 12))
async def test_cancelled_at_any_await_it_goes_on_where_it_was(site, line):
    site.fail("f1")
    count = 0

    async def dies(task, *args):
        nonlocal count
        count += 1
        if count == line:
            raise asyncio.CancelledError
        result = await plain(task, *args)
        count += 1
        if count == line:
            raise asyncio.CancelledError  # after its effect, before anybody knows
        return result

    with contextlib.suppress(asyncio.CancelledError):
        await respond(dies)
    assert count >= line, "it died"
    await site.respond()
    state = site.journal.state
    assert state.jobs["gpt-a"].generation == 2
    assert {i.status for i in state.incidents.values()} == {IncidentStatus.CLOSED}
    launches = [step for kind, step in site.agents.effects if kind == "launch_ranks"]
    assert len(launches) == len(set(launches)) == 4
    kinds = [kind for kind, _ in site.agents.effects[-7:]]
    assert kinds.index("launch_ranks") > max(i for i, kind in enumerate(kinds) if kind == "stop_ranks")


@pytest.mark.parametrize("number", range(1, 6))
async def test_a_step_whose_completion_could_not_be_journalled_has_its_effect_once(site, monkeypatch, number):
    """Death between the effect and its entry: the step is carried out again, and agents answer it from memory."""
    site.fail("f1")
    effects, append, seen = len(site.agents.effects), Journal.append, []

    def fails_once(journal, event):
        if isinstance(event, StepCompleted):
            seen.append(event.id)
            if len(seen) == number:
                raise StoreError("the store is away for a moment")
        return append(journal, event)

    monkeypatch.setattr(Journal, "append", fails_once)
    await site.respond()
    assert len(seen) == 6, "one of the five steps was journalled at its second attempt"
    done = site.agents.effects[effects:]
    assert len(done) == len(set(done))
    assert site.journal.state.jobs["gpt-a"].generation == 2


def refusing(site, kind):
    """Calls tasks while agents refuse the command, until that is told as a failure."""
    site.agents.refuse[kind] = "no memory"

    async def call(task, *args):
        if any(failure.id.startswith("step/") for i in site.journal.state.incidents.values() for failure in i.failures):
            site.agents.refuse.clear()
        return await plain(task, *args)

    return call


async def test_a_refused_step_is_a_failure_of_the_job_and_is_planned_again(site):
    site.fail("f1")
    await respond(refusing(site, "launch_ranks"))
    state = site.journal.state
    told = [failure.evidence for i in state.incidents.values() for failure in i.failures]
    assert any("no memory" in text for text in told)
    assert (state.jobs["gpt-a"].status, state.jobs["gpt-a"].pending) == (JobStatus.RUNNING, None)
    assert {i.status for i in state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_a_job_that_can_never_start_is_stopped_with_the_reason(site):
    site.fail("f1")
    site.agents.refuse["launch_ranks"] = "no memory"
    await site.respond()
    job = site.journal.state.jobs["gpt-a"]
    assert job.status is JobStatus.FAILED
    assert "without a new iteration" in job.reason
    assert {i.status for i in site.journal.state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_an_agent_that_cannot_let_go_is_isolated_and_blocks_nobody(site):
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    site.agents.refuse_on["node-2"] = "the process does not die"
    await site.respond()
    state = site.journal.state
    assert state.nodes["node-2"].status is NodeStatus.QUARANTINED
    assert (state.jobs["gpt-a"].status, state.jobs["gpt-a"].gpus) == (JobStatus.CANCELLED, 0)
    assert {i.status for i in state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_a_new_submission_begins_anew_unless_it_asks_for_the_latest(site, monkeypatch):
    chosen = []
    fence = CheckpointRepository.fence
    monkeypatch.setattr(
        CheckpointRepository,
        "fence",
        lambda self, generation, *, anew, **more: chosen.append(anew) or fence(self, generation, anew=anew, **more),
    )
    site.fail("f1")
    await site.respond()
    spec = site.journal.state.jobs["gpt-a"].spec
    for number, load in ((2, ""), (3, "latest")):
        before = site.journal.state.jobs["gpt-a"].submission
        site.journal.append(JobCancelled(id=f"c{number}", at=1.0, job="gpt-a", submission=before))
        await site.respond()
        again = replace(spec, load=load)
        site.journal.append(JobSubmitted(id=f"s{number}", at=1.0, submission=str(number), spec=again))
        await site.respond()
    assert chosen == [False, True, False]


async def test_a_node_that_goes_during_the_transition_supersedes_the_plan(site):
    site.fail("f1")

    async def loses_a_node(task, *args):
        step = args[1] if len(args) > 1 else None
        if step is not None and step.kind is StepKind.LAUNCH and not site.agents.gone:
            site.agents.gone.add("node-2")
            failure = Failure(
                id="lost", kind=ErrorKind.NODE_LOST, method=DetectionMethod.NODE_HEALTH, seen_at=1.0, node="node-2", boot="b"
            )
            site.journal.append(FailureDetected(id="lost", at=1.0, failure=failure))
        return await plain(task, *args)

    await respond(loses_a_node)
    state = site.journal.state
    assert state.jobs["gpt-a"].gpus == 2
    assert state.jobs["gpt-a"].nodes == {"node-1"}
    superseded = [p for p in state.plans.values() if p.superseded_by]
    assert len(superseded) == 1
    assert {i.status for i in state.incidents.values()} == {IncidentStatus.CLOSED}


# ranks that live on


def results(state, job="gpt-a"):
    """What the steps of the newest finished plan of the job told."""
    done = [it for it in state.plans.values() if it.finished_at is not None and it.plan.assignment_of(job)]
    return {step.kind: done[-1].results[step.id] for step in done[-1].plan.steps if step.job == job}


async def test_survivors_live_on_and_the_journal_tells_from_where_the_job_went_on(site):
    site.fail("f1")
    await site.respond()
    assert sorted(site.agents.adopted) == [("node-1", "gpt-a", 2), ("node-2", "gpt-a", 2)]
    assert not [kind for kind, _ in site.agents.effects if kind in {"drain_ranks", "save_replica"}]
    told = results(site.journal.state)
    assert told[StepKind.DRAIN] == {
        "source": "memory of 2 ranks",
        "iteration": 7,
        "manifest": None,
        "held": 2,
        "micro_batches": 6,
    }
    assert told[StepKind.STOP] == {"stopped": 0}
    assert (told[StepKind.RESTORE]["iteration"], told[StepKind.RESTORE]["fallback_iteration"]) == (7, -1)
    assert told[StepKind.LAUNCH]["from"] == "memory of 2 ranks"
    assert told[StepKind.RESUME]["from"] == "own memory of 4 ranks; 12 micro-batches kept, 0 computed again"
    assert told[StepKind.RESUME]["went_on_after"] == 7
    (incident,) = [it for it in site.journal.state.incidents.values() if it.is_failure]
    assert timing(site.journal.state, incident).lost_iterations == 0


async def test_after_a_launch_in_vain_no_rank_lives_on(site):
    site.fail("f1")
    await respond(refusing(site, "launch_ranks"))
    assert site.agents.adopted == []
    kinds = [kind for kind, _ in site.agents.effects]
    assert kinds.index("hold_ranks") < kinds.index("drain_ranks")
    assert site.agents.held == {}
    assert set(site.agents.running.values()) == {3}


async def test_ranks_held_by_a_plan_that_is_superseded_live_on_in_the_next_one(site):
    site.fail("f1")

    async def fails_again(task, *args):
        step = args[1] if len(args) > 1 else None
        if step is not None and step.kind is StepKind.LAUNCH and site.journal.state.jobs["gpt-a"].generation == 2:
            site.fail("f2", rank=2, iteration=8)
        return await plain(task, *args)

    await respond(fails_again)
    assert site.journal.state.jobs["gpt-a"].generation == 3
    assert set(site.agents.running.values()) == {3}
    assert {("node-1", "gpt-a", 3), ("node-2", "gpt-a", 3)} <= set(site.agents.adopted)


async def test_a_job_that_is_cancelled_while_its_ranks_are_held_leaves_none_behind(site):
    site.fail("f1")

    async def is_cancelled(task, *args):
        step = args[1] if len(args) > 1 else None
        if step is not None and step.kind is StepKind.LAUNCH:
            assert site.agents.held
            site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
        return await plain(task, *args)

    await respond(is_cancelled)
    await site.respond()
    assert site.journal.state.jobs["gpt-a"].status is JobStatus.CANCELLED
    assert (site.agents.held, site.agents.running) == ({}, {})
