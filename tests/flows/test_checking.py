"""`check-nodes` over fake agents: who meets whom, what is journalled, and that no node that trains is touched."""

import pytest
from checked_agents import IDLE, put_in_place
from conftest import FakeSite

from flows import checking, response
from flows.response import plain
from unicron_lib.diagnosis.check_consequences import SLOW, SUSPECTED
from unicron_lib.diagnosis.node_check import Meeting, Report, verdicts
from unicron_lib.domain.cluster import BY_HAND, NodeStatus
from unicron_lib.domain.events import FailureDetected, NodeNoted, NodeQuarantined, NodeReleased, PlanDecided
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import Plan, PlanKind
from unicron_lib.errors import UserError


@pytest.fixture
def checked(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """The site with one job on two nodes, and four more nodes that nobody has given ranks."""
    site.agents = put_in_place(response.services(), monkeypatch)
    return site


async def check(*names: str) -> dict[str, str]:
    rows = await checking.check(plain, list(names), 1.0)
    return {str(row["node"]): str(row["verdict"]) for row in rows}


def events(site: FakeSite, kind: type) -> list:
    return [entry.event for entry in site.journal.entries() if isinstance(entry.event, kind)]


def isolate(site: FakeSite, node: str) -> None:
    plan = Plan(
        id=f"p-{node}", kind=PlanKind.REALLOCATE, incidents=(), attempt=0, basis_seq=0, reason="r", quarantined={node: "ecc"}
    )
    site.journal.append(PlanDecided(id=f"decided/{node}", at=2.0, plan=plan))
    assert site.journal.refresh().nodes[node].status is NodeStatus.QUARANTINED


async def test_the_faulty_node_is_journalled_as_failed_and_isolated(checked):
    checked.agents.faulty = {"node-4"}
    found = await check(*IDLE)
    assert found == {"node-3": "good", "node-4": "faulty", "node-5": "good", "node-6": "good"}
    met = [("node-3", "node-4"), ("node-5", "node-6"), ("node-3", "node-5"), ("node-4", "node-6")]
    assert list(checked.agents.groups.values()) == met
    (told,) = events(checked, FailureDetected)
    assert (told.failure.node, told.failure.kind, told.failure.job) == ("node-4", ErrorKind.NETWORK_ERROR, None)
    assert "failed again, with node-6, which is good: RuntimeError: connection closed by peer" in told.failure.evidence
    await checked.respond()
    assert checked.journal.refresh().nodes["node-4"].status is NodeStatus.QUARANTINED


async def test_what_a_device_says_names_the_kind(checked):
    checked.agents.broken = {"node-3"}
    assert (await check(*IDLE[:2]))["node-3"] == "faulty"
    (told,) = events(checked, FailureDetected)
    assert told.failure.kind is ErrorKind.ECC_ERROR
    assert "memory test on cuda:0: 2 words wrong" in told.failure.evidence


async def test_a_cleared_node_leaves_quarantine_with_the_check_as_the_reason(checked):
    isolate(checked, "node-3")
    assert await check("node-3", "node-4") == {"node-3": "good", "node-4": "good"}
    (told,) = events(checked, NodeReleased)
    assert told.node == "node-3"
    assert told.reason == "a node check cleared it: exchanged data with node-4 intact, in 0.1 s"
    assert checked.journal.refresh().nodes["node-3"].status is NodeStatus.READY


async def test_a_node_that_a_person_isolated_stays_so_although_it_passes(checked):
    reason = f"{BY_HAND}: its fan is noisy"
    checked.journal.append(NodeQuarantined(id="by-hand", at=2.0, node="node-3", reason=reason))
    assert await check("node-3", "node-4") == {"node-3": "good", "node-4": "good"}
    assert checked.journal.refresh().nodes["node-3"].reason == reason
    assert events(checked, NodeReleased) == []


async def test_a_node_that_is_still_faulty_stays_isolated(checked):
    isolate(checked, "node-3")
    checked.agents.faulty = {"node-3"}
    assert (await check("node-3", "node-4", "node-5"))["node-3"] == "faulty"
    assert checked.journal.refresh().nodes["node-3"].status is NodeStatus.QUARANTINED
    assert events(checked, NodeReleased) == []


async def test_a_slow_node_is_noted_until_a_check_finds_it_as_fast_as_others(checked):
    checked.agents.slow = {"node-3"}
    assert (await check(*IDLE))["node-3"] == "straggler"
    assert "9.0 times as long as usual" in checked.journal.refresh().nodes["node-3"].notes[SLOW]
    checked.agents.slow = set()
    assert (await check(*IDLE))["node-3"] == "good"
    assert checked.journal.refresh().nodes["node-3"].notes == {}
    assert [event.active for event in events(checked, NodeNoted)] == [True, False]


async def test_one_that_is_neither_cleared_nor_convicted_is_noted_with_the_reason_until_it_passes(checked):
    checked.agents.broken, checked.agents.faulty = {"node-4"}, {"node-3"}  # whom it met first speaks for neither
    assert await check("node-3", "node-4") == {"node-3": "undetermined", "node-4": "faulty"}
    assert checked.journal.refresh().nodes["node-3"].notes == {}, "no two passed: nothing is said"
    names = ("node-3", "node-4", "node-5", "node-6")
    meetings = [
        Meeting(turn=0, reports=tuple(Report(node=name, exchanged=ok) for name in pair))
        for pair, ok in (((names[:2]), False), ((names[2:]), True))
    ]
    found = tuple(verdicts(names, meetings).values())
    state = checked.journal.refresh()
    await checking.conclude.fn("node-check/1", found, state.nodes)
    told = checked.journal.refresh().nodes["node-3"].notes[SUSPECTED]
    assert told.startswith(
        "a node check could neither clear nor convict it: failed with node-4, and it may be the fault of another"
    )
    checked.agents.faulty = set()
    assert (await check(*IDLE[:1], *IDLE[2:]))["node-3"] == "good"
    assert checked.journal.refresh().nodes["node-3"].notes == {}


async def test_with_no_healthy_pair_nobody_is_accused(checked):
    checked.agents.faulty = set(IDLE)
    before = checked.journal.refresh().seq
    assert set((await check(*IDLE)).values()) == {"undetermined"}
    assert checked.journal.refresh().seq == before


async def test_an_agent_that_is_gone_is_not_judged_and_the_others_are(checked):
    checked.agents.gone = {"node-3"}
    found = await check(*IDLE)
    assert found == {"node-3": "undetermined", "node-4": "good", "node-5": "good", "node-6": "good"}


async def test_every_store_that_was_opened_is_closed(checked):
    checked.agents.faulty = {"node-4"}
    await check(*IDLE)
    kinds = [kind for kind, step in checked.agents.effects if step.startswith("node-check")]
    assert kinds.count("open_rendezvous") == kinds.count("stop_ranks") == 4


async def test_a_node_that_trains_is_refused_and_left_out_when_none_is_named(checked):
    with pytest.raises(UserError, match="node-1 cannot be checked: it trains gpt-a"):
        await check("node-1", "node-3")
    with pytest.raises(UserError, match="no node 'node-9'"):
        await check("node-9")
    assert set(await check()) == set(IDLE)
    isolate(checked, "node-3")
    assert set(await check()) == set(IDLE) - {"node-3"}
