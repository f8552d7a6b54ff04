"""The journal before everything: what is told twice, too late or by a dying process is acted on once."""

import asyncio
import contextlib
from collections import Counter

import pytest

from flows.response import plain, respond
from tasks.health import report
from unicron_lib.agent.messages import Observation, RankExited
from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.journal import fold_all
from unicron_lib.domain.plans import StepKind
from unicron_lib.journal import Journal


def exited(job="gpt-a", generation=1, seq=0):
    body = RankExited(job=job, generation=generation, rank=1, pid=1, exit_code=-9, iteration=7)
    return Observation(node="node-1", boot="b", seq=seq, at=1.0, body=body)


def failures(journal):
    return [entry.event.id for entry in journal.entries() if isinstance(entry.event, FailureDetected)]


class Dies(BaseException):
    """What SIGKILL would do: nothing after it runs."""


@pytest.mark.parametrize("moment", ["before the journal", "after the journal", "while telling Prefect", "while acknowledging"])
async def test_a_process_that_dies_while_it_reports_loses_nothing(site, monkeypatch, moment):
    """PB47: whoever is told the observation again reports it again; it is one failure and one incident."""
    acknowledged, died, append = [], [], Journal.append

    def dies(when):
        if when == moment and not died:
            died.append(when)
            raise Dies

    def journals(journal, event):
        dies("before the journal")
        done = append(journal, event)
        dies("after the journal")
        return done

    async def acknowledges(_, ids):
        dies("while acknowledging")
        acknowledged.extend(ids)
        return len(acknowledged)

    def emits(**_):
        assert failures(site.journal) == ["node-1/b/0"], "Prefect hears only of what is journalled"
        dies("while telling Prefect")

    monkeypatch.setattr(Journal, "append", journals)
    monkeypatch.setattr("fake_site.FakeController.acknowledge", acknowledges)
    monkeypatch.setattr("tasks.events.emit_event", emits)
    with pytest.raises(Dies):
        await report(exited())
    assert died == [moment]
    assert acknowledged == []
    await report(exited())
    assert acknowledged == ["node-1/b/0"]
    assert failures(site.journal) == ["node-1/b/0"]
    assert len([it for it in site.journal.refresh().incidents.values() if it.is_failure]) == 1


async def test_a_prefect_that_takes_no_event_delays_no_acknowledgement(site, monkeypatch):
    """PB47: the event is lost, the failure is not."""
    told, emitted = [], []

    def refuses(**keys):
        emitted.append(keys["event"])
        raise RuntimeError("no event worker")

    async def acknowledges(_, ids):
        told.extend(ids)
        return len(told)

    monkeypatch.setattr("tasks.events.emit_event", refuses)
    monkeypatch.setattr("fake_site.FakeController.acknowledge", acknowledges)
    await report(exited())
    assert emitted, "it was to be told"
    assert told == ["node-1/b/0"]
    await site.respond()
    assert {it.status for it in site.journal.state.incidents.values()} == {IncidentStatus.CLOSED}


@pytest.mark.parametrize("kind", list(StepKind))
async def test_a_responder_that_is_killed_holds_nothing(site, kind):
    """PB52: it dies in the middle of a transition, a second failure arrives, the next one heals both."""
    site.fail("f1")
    stuck, _, responder = frozen_at(kind)
    await stuck.wait()
    responder.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await responder
    assert site.journal.refresh().active_plan, "the plan is still the dead one's"
    site.fail("f2", rank=0)
    await site.respond()
    state = site.journal.state
    assert {it.status for it in state.incidents.values()} <= {IncidentStatus.CLOSED, IncidentStatus.MERGED}
    assert set(site.agents.running.values()) == {state.jobs["gpt-a"].generation}
    assert most_active_plans(site.journal) == 1


def frozen_at(kind):
    """A responder that stops at its first step of `kind`: set when it has, what wakes it, and its task."""
    stuck, wake = asyncio.Event(), asyncio.Event()

    async def freezes(task, *args):
        step = args[1] if len(args) > 1 else None
        if step is not None and step.kind is kind:
            stuck.set()
            await wake.wait()
        return await plain(task, *args)

    return stuck, wake, asyncio.create_task(respond(freezes))


async def test_a_responder_that_was_frozen_does_nothing_again(site):
    """PB52: stopped in the middle of a step, overtaken, and woken: the other one's work stands."""
    site.fail("f1")
    stuck, wake, responder = frozen_at(StepKind.LAUNCH)
    await stuck.wait()
    site.fail("f2", rank=0)
    await site.respond()
    wake.set()
    await responder
    counts = Counter(site.agents.effects)
    assert set(counts.values()) == {1}
    assert set(site.agents.running.values()) == {site.journal.refresh().jobs["gpt-a"].generation}
    assert most_active_plans(site.journal) == 1


def most_active_plans(journal):
    """The largest number of plans that were under way at any time."""
    events = [entry.event for entry in journal.entries()]
    states = (fold_all(events[:count]) for count in range(len(events) + 1))
    return max(sum(plan.is_active for plan in state.plans.values()) for state in states)
