"""Before a job starts for the first time its nodes are checked, if asked for: what is found, and what becomes of the job."""

import asyncio
import dataclasses
import time

import httpx
import pytest
from checked_agents import put_in_place
from conftest import TASKS, FakeSite
from scenes import TABLE

from flows import checking, response, unasked_checks
from flows.unasked_checks import check_launch
from unicron_lib.domain.checked import LaunchChecked
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import JobSubmitted
from unicron_lib.domain.jobs import JobSpec, JobStatus
from unicron_lib.errors import StoreError

MODULES = (*TASKS, "flows.response", "flows.unasked_checks")


@pytest.fixture
async def waiting(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """The site, where first starts wait for a check, with nodes without ranks, and a job that was just submitted."""
    made = response.services()
    asking = dataclasses.replace(made, settings=dataclasses.replace(made.settings, check_nodes=frozenset({"launch"})))
    for module in MODULES:
        monkeypatch.setattr(f"{module}.services", lambda: asking)
    site.agents = put_in_place(asking, monkeypatch)
    await site.respond()
    site.idle = sorted(set(site.journal.state.nodes) - site.journal.state.jobs["gpt-a"].nodes)
    assert len(site.idle) == 2
    asked = site.asked = []

    async def away() -> bool:
        return False

    run = checking.run_check

    async def noted(nodes, deadline_s):
        asked.append(nodes)
        return await run(nodes, deadline_s)

    monkeypatch.setattr(checking, "prefect_answers", away)
    monkeypatch.setattr(unasked_checks, "run_check", noted)
    submit(site, "gpt-b")
    return site


def submit(site: FakeSite, job: str) -> None:
    spec = JobSpec(job=job, min_gpus=2, max_gpus=2, throughput_flops=TABLE)
    site.journal.append(JobSubmitted(id=f"s-{job}", at=time.time(), submission=job, spec=spec))


def told(site: FakeSite) -> list[str]:
    return [entry.event.told for entry in site.journal.entries() if isinstance(entry.event, LaunchChecked)]


def nodes_of(site: FakeSite, job: str) -> set[str]:
    return set(site.journal.refresh().jobs[job].nodes)


def reason(site: FakeSite) -> str:
    (incident,) = [it for it in site.journal.refresh().incidents.values() if it.jobs == ("gpt-b",)]
    return site.journal.state.plans[incident.plan].plan.reason


async def test_a_new_job_waits_for_the_check_and_starts_after_it(waiting):
    answering = asyncio.create_task(waiting.respond())
    while waiting.agents.groups == {}:
        assert waiting.journal.refresh().jobs["gpt-b"].status is JobStatus.QUEUED
        await check_launch()
    await answering
    assert waiting.asked == [waiting.idle]
    assert nodes_of(waiting, "gpt-b") <= set(waiting.idle)
    assert told(waiting) == ["2 of 2 nodes passed a check first"]
    assert "job submitted: gpt-b (2 of 2 nodes passed a check first)" in reason(waiting)


async def test_a_faulty_node_is_isolated_and_the_plan_is_made_without_it(waiting):
    bad, good = waiting.idle
    waiting.agents.broken = {bad}
    await check_launch()
    await waiting.respond()
    state = waiting.journal.refresh()
    assert state.nodes[bad].status is NodeStatus.QUARANTINED
    assert nodes_of(waiting, "gpt-b") == {good}
    assert f"1 of 2 nodes passed a check first; {bad} is faulty" in reason(waiting)


async def test_the_next_job_starts_at_once_since_its_nodes_passed_lately(waiting):
    await check_launch()
    await waiting.respond()
    submit(waiting, "gpt-c")
    await waiting.respond()
    assert nodes_of(waiting, "gpt-c")
    assert len(waiting.asked) == len(told(waiting)) == 1


async def test_a_check_that_breaks_off_is_told_and_the_job_starts_anyway(waiting, monkeypatch):
    async def breaks(*_):
        raise StoreError("the store is out of reach")

    monkeypatch.setattr(unasked_checks, "run_check", breaks)
    await check_launch()
    await waiting.respond()
    assert nodes_of(waiting, "gpt-b")
    assert "its nodes were not checked: the store is out of reach" in reason(waiting)


async def test_nodes_are_checked_although_prefect_breaks_off(waiting, monkeypatch):
    async def answers() -> bool:
        return True

    async def breaks(*_):
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(checking, "prefect_answers", answers)
    monkeypatch.setattr(checking, "check_nodes", breaks)
    await check_launch()
    assert told(waiting) == ["2 of 2 nodes passed a check first"]


async def test_a_check_that_takes_too_long_is_given_up_and_the_job_starts(waiting, monkeypatch):
    async def hangs(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(unasked_checks, "run_check", hangs)
    monkeypatch.setattr(unasked_checks, "SPARE_S", 1e6)
    await check_launch()
    await waiting.respond()
    assert nodes_of(waiting, "gpt-b")
    assert told(waiting) == ["its nodes were not checked: that took too long"]


async def test_a_failure_meanwhile_waits_for_nothing(waiting, monkeypatch):
    begun = asyncio.Event()

    async def hangs(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(unasked_checks, "run_check", hangs)
    checking_it = asyncio.create_task(check_launch())
    await begun.wait()
    waiting.fail("f1", node="node-1", boot="b")
    (failed,) = [it for it in waiting.journal.refresh().open_incidents if it.is_failure]
    await response.respond(response.plain, incident=failed.id)
    assert waiting.journal.refresh().jobs["gpt-b"].status is JobStatus.QUEUED, "that one still waits"
    checking_it.cancel()
    await asyncio.gather(checking_it, return_exceptions=True)
    assert told(waiting) == []


async def test_nothing_is_checked_if_nobody_asked_for_it(waiting, monkeypatch):
    found = unasked_checks.services()
    never = dataclasses.replace(found, settings=dataclasses.replace(found.settings, check_nodes=frozenset()))
    for module in MODULES:
        monkeypatch.setattr(f"{module}.services", lambda: never)
    await check_launch()
    await unasked_checks.keep_launches_checked()
    await waiting.respond()
    assert nodes_of(waiting, "gpt-b")
    assert waiting.asked == []
