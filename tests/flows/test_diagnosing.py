"""Once a recovery is done, the service finds out why its incident happened, from the ends of the ranks' logs."""

import asyncio
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import FakeSite

from flows import diagnosing, response
from flows.diagnosing import TRIES, diagnose_next
from flows.response import plain
from tasks import diagnosis, reporting
from unicron_lib.agent.inquiries import ReadLog
from unicron_lib.agent.messages import Reply
from unicron_lib.diagnosis.tails import packed_tail
from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.report import incident_markdown

LOG = """2025-03-01 10:00:00,000 INFO iteration        7/     100 | lm loss: 2.0 | number of nan iterations:   0 |
2025-03-01 10:00:01,000 ERROR training: broke off
Traceback (most recent call last):
  File "/srv/train.py", line 12, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB
api_key=sk-abcdefghijklmnop0123 was used
"""


@pytest.fixture
def diagnosed(site: FakeSite, monkeypatch: pytest.MonkeyPatch, tmp_path) -> FakeSite:
    """The site, whose agents have such a log of every rank; what Prefect is shown is kept in `site.artifacts`."""
    log = tmp_path / "g1-r1.log"
    log.write_text(LOG)
    made, carry_out = response.services(), site.agents.carry_out

    def with_logs(node, command):
        if not isinstance(command, ReadLog):
            return carry_out(node, command)
        tail = packed_tail(log)
        site.agents.effects.append(("read_log", f"{node}: {command.job}/{command.generation}/{command.rank}"))
        result = {"file": f"/run/g{command.generation}-r{command.rank}.log", "first_line": 1, "packed": tail.packed}
        return Reply(step=command.step, ok=True, result=result)

    monkeypatch.setattr(site.agents, "carry_out", with_logs)
    for module in (diagnosis, diagnosing):
        monkeypatch.setattr(module, "services", lambda: made)
    site.artifacts = []

    async def show(markdown, *, key, description):
        site.artifacts.append(SimpleNamespace(markdown=markdown, key=key, description=description))

    monkeypatch.setattr(reporting, "_add_artifact", show)
    return site


def told(site: FakeSite) -> list[IncidentDiagnosed]:
    return [it.event for it in site.journal.entries() if isinstance(it.event, IncidentDiagnosed)]


def logs_read(site: FakeSite) -> list[str]:
    return [step for kind, step in site.agents.effects if kind == "read_log"]


def close_just_now(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake site's clock began long ago, the journal's is now."""
    closed = max(it.closed_at or 0.0 for it in site.journal.state.incidents.values())
    monkeypatch.setattr(diagnosing, "time", SimpleNamespace(time=lambda: closed + 1.0))


async def test_a_healed_incident_is_diagnosed_from_the_log_of_its_rank(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b")
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    await diagnose_next(Counter())
    (event,) = told(diagnosed)
    assert (event.kind, event.source) == ("out_of_memory", "user")
    assert "CUDA out of memory" in event.root_cause
    assert event.evidence[0].startswith("node-1:/run/g1-r1.log:6  torch.OutOfMemoryError")
    assert logs_read(diagnosed) == ["node-1: gpt-a/1/1"]
    (artifact,) = diagnosed.artifacts
    assert artifact.key == event.incident
    assert "## Why, as the logs tell" in artifact.markdown
    assert artifact.markdown == incident_markdown(diagnosed.journal.state, event.incident), "explain tells the same"


async def test_prefect_is_told_once_why_with_jobs_and_node_and_without_keys(diagnosed, monkeypatch):
    emitted = []
    monkeypatch.setattr("tasks.events.emit_event", lambda **event: emitted.append(event))
    words = "S3UploadFailedError: failed with token=abcdef0123456789secret: expired token"
    diagnosed.fail("f1", node="node-1", boot="b", evidence=words)
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    await asyncio.gather(diagnose_next(Counter()), diagnose_next(Counter()))
    (event,) = told(diagnosed)
    (emitted,) = [it for it in emitted if it["event"] == "unicron.incident.diagnosed"]
    assert emitted["resource"]["prefect.resource.id"] == f"unicron.incident.{event.incident}"
    roles = {it["prefect.resource.role"]: it["prefect.resource.id"] for it in emitted["related"]}
    assert roles == {"job": "unicron.job.gpt-a", "node": "unicron.node.node-1"}
    payload = emitted["payload"]
    assert (payload["kind"], payload["source"], payload["severity"]) == (event.kind, event.source, "SEV2")
    assert (payload["recoverable"], payload["evidence"]) == (event.recoverable, event.evidence[0])
    assert "abcdef0123456789secret" not in str(emitted)


async def test_what_contradicts_the_recovery_is_told_and_changes_nothing(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b")
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    before = diagnosed.journal.state
    await diagnose_next(Counter())
    (event,) = told(diagnosed)
    after = diagnosed.journal.state
    assert "the recovery took it for process_exit and was not changed" in incident_markdown(after, event.incident)
    assert (after.plans, after.jobs, after.nodes) == (before.plans, before.jobs, before.nodes)
    await diagnosed.respond()
    assert diagnosed.journal.state.plans == before.plans


async def test_nothing_is_read_while_the_recovery_is_at_work(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b")
    seen = []

    async def looking(task, *args):
        await diagnose_next(Counter())
        seen.append(list(logs_read(diagnosed)))
        return await plain(task, *args)

    await response.respond(looking)
    assert len(seen) >= 6
    assert not any(seen)
    assert {it.status for it in diagnosed.journal.state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_a_recovery_that_waits_for_long_is_diagnosed_meanwhile(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b")

    async def stands(task, *args):
        if task.name == "complete":
            raise asyncio.CancelledError
        return await plain(task, *args)

    with pytest.raises(asyncio.CancelledError):
        await response.respond(stands)
    (progress,) = [it for it in diagnosed.journal.state.plans.values() if it.is_active]
    monkeypatch.setattr(diagnosing, "time", SimpleNamespace(time=lambda: progress.decided_at + 9.0))
    await diagnose_next(Counter())
    assert told(diagnosed) == []
    monkeypatch.setattr(diagnosing, "time", SimpleNamespace(time=lambda: progress.decided_at + 11.0))
    await diagnose_next(Counter())
    assert len(told(diagnosed)) == 1
    await diagnosed.respond()
    assert {it.status for it in diagnosed.journal.state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_it_is_diagnosed_once_whoever_asks_and_however_often(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b")
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    await asyncio.gather(diagnose_next(Counter()), diagnose_next(Counter()))
    await diagnose_next(Counter())
    assert len(told(diagnosed)) == 1


async def test_a_node_that_is_gone_leaves_what_was_seen_and_says_which_log_is_missing(diagnosed, monkeypatch):
    diagnosed.fail("f1", node="node-1", boot="b", evidence="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    diagnosed.agents.gone.add("node-1")
    await diagnose_next(Counter())
    (event,) = told(diagnosed)
    assert event.kind == "ecc_error"
    assert event.unread == ("gpt-a rank 1 at node-1: node node-1 is not connected",)
    assert "not read: gpt-a rank 1" in incident_markdown(diagnosed.journal.state, event.incident)


async def test_past_incidents_that_read_alike_are_named(diagnosed, monkeypatch):
    for name in ("f1", "f2"):
        words = "OSError: the flux capacitor of shelf seven lost its phase"
        diagnosed.fail(name, node="node-1", boot="b", evidence=words)
        await diagnosed.respond()
        close_just_now(diagnosed, monkeypatch)
        diagnosed.agents.gone = {"node-1"}
        await diagnose_next(Counter())
        diagnosed.agents.gone = set()
    first, second = told(diagnosed)
    assert first.similar == ()
    assert second.similar == (first.incident,)


@pytest.mark.parametrize("program", ["import sys; sys.exit('broken')", "print('nonsense')"])
async def test_a_diagnosis_that_fails_is_tried_a_few_times_and_harms_nothing(diagnosed, monkeypatch, tmp_path, program):
    diagnosed.fail("f1", node="node-1", boot="b")
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    stub.chmod(0o755)
    monkeypatch.setattr(diagnosis, "sys", SimpleNamespace(executable=str(stub)))
    tries = Counter()
    for _ in range(TRIES + 2):
        await diagnose_next(tries)
    assert set(tries.values()) == {TRIES}
    assert told(diagnosed) == []
    assert {it.status for it in diagnosed.journal.state.incidents.values()} == {IncidentStatus.CLOSED}


async def test_keys_do_not_get_from_a_log_into_the_journal(diagnosed, monkeypatch):
    words = "S3UploadFailedError: failed with token=abcdef0123456789secret: expired token"
    diagnosed.fail("f1", node="node-1", boot="b", evidence=words)
    await diagnosed.respond()
    close_just_now(diagnosed, monkeypatch)
    diagnosed.agents.gone.add("node-1")
    await diagnose_next(Counter())
    (event,) = told(diagnosed)
    assert "abcdef0123456789secret" not in str(replace(event))
