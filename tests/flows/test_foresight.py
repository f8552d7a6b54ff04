"""The recovery service's plans made ahead: a node loss is answered from the table."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from flows.foresight import is_quiet, keep_foreseeing
from tasks import planning
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure


@pytest.fixture
def table() -> Iterator[object]:
    planning.table.cache_clear()
    yield planning.table
    planning.table.cache_clear()


async def test_a_node_loss_is_answered_from_the_table(site, table):
    planned = planning.foresee(site.journal.state)
    assert planned >= 3, "a loss, an end, a join"
    now, by = time.time(), DetectionMethod.NODE_HEALTH
    lost = Failure(id="lost", kind=ErrorKind.NODE_LOST, method=by, seen_at=now, node="node-2", boot="b")
    site.journal.append(FailureDetected(id="lost", at=now, failure=lost))
    await site.respond()
    state = site.journal.state
    plan = next(p.plan for p in state.plans.values() if state.incidents[p.plan.incidents[0]].is_failure)
    assert (plan.method, plan.optimal, plan.gpus) == ("table", True, {"gpt-a": 2})


async def test_it_plans_ahead_after_each_change_and_only_while_all_is_quiet(site, table, monkeypatch):
    monkeypatch.setattr("flows.foresight.services", planning.services)
    monkeypatch.setattr("flows.foresight.LOOK_S", 0.001)
    asked = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def note(state: ClusterState) -> int:
        assert is_quiet(state)
        loop.call_soon_threadsafe(asked.put_nowait, state.seq)
        return 0

    monkeypatch.setattr("flows.foresight.foresee", note)
    working = asyncio.create_task(keep_foreseeing())
    first = await asked.get()
    site.fail("f1")
    await site.respond()
    async with asyncio.timeout(30):
        assert await asked.get() > first
    working.cancel()
    await asyncio.wait([working])


async def test_it_stops_as_soon_as_the_journal_goes_on(site, table):
    old = site.journal.state
    site.fail("f1")
    assert planning.foresee(old) == 0
