"""Nodes that failed and are back are checked while they are idle; jobs never wait for that."""

from types import SimpleNamespace

import pytest
from checked_agents import put_in_place
from conftest import FakeSite

from flows import checking, response, unasked_checks
from flows.unasked_checks import check_due
from unicron_lib.config import Settings
from unicron_lib.diagnosis.unasked_checks import EVERY_S, FAILED_WITHIN_S, SETTLE_S, due_nodes
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import FailureDetected, NodeJoined, NodeQuarantined
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.errors import UserError

NOW = 10_000.0
REJOINED, IDLE_TOO = frozenset({"rejoined"}), frozenset({"idle"})


@pytest.fixture
async def idle(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """The site with one job and four idle nodes, of which the first was lost and is back, some time ago."""
    made = response.services()
    site.agents = put_in_place(made, monkeypatch)
    for name in ("node-7", "node-8"):
        site.journal.append(NodeJoined(id=f"j-{name}", at=1.0, node=name, boot="b", address="a", num_gpus=2))
    await site.respond()
    site.idle = sorted(set(site.journal.state.nodes) - site.journal.state.jobs["gpt-a"].nodes)
    site.back = site.idle[0]
    fail(site, "lost", node=site.back, boot="b")
    site.journal.append(NodeJoined(id="back", at=NOW - 100, node=site.back, boot="c", address="a", num_gpus=2))
    await site.respond()
    assert len(site.idle) == 4
    assert not site.journal.state.jobs["gpt-a"].nodes & set(site.idle)
    monkeypatch.setattr(unasked_checks, "services", lambda: made)
    monkeypatch.setattr(unasked_checks, "time", SimpleNamespace(time=lambda: NOW))

    async def away():
        return False

    monkeypatch.setattr(checking, "prefect_answers", away)
    return site


def fail(site: FakeSite, name: str, *, node: str, boot: str, kind: ErrorKind = ErrorKind.NODE_LOST) -> None:
    by = DetectionMethod.NODE_HEALTH
    failure = Failure(id=name, kind=kind, method=by, seen_at=NOW - 200, node=node, boot=boot)
    site.journal.append(FailureDetected(id=name, at=NOW - 200, failure=failure))


async def test_a_node_that_is_back_is_checked_with_two_idle_ones(idle):
    checked = {}
    await check_due(checked)
    assert {name for group in idle.agents.groups.values() for name in group} == set(idle.idle[:3])
    assert idle.journal.refresh().nodes[idle.back].status is NodeStatus.READY
    rounds = len(idle.agents.groups)
    await check_due(checked)
    assert len(idle.agents.groups) == rounds, "once for each time that it failed"


async def test_one_that_fails_the_check_is_isolated_with_the_reason(idle):
    idle.agents.faulty = {idle.back}
    await check_due({})
    await idle.respond()
    node = idle.journal.refresh().nodes[idle.back]
    assert node.status is NodeStatus.QUARANTINED
    seen = [failure.evidence for it in idle.journal.state.incidents.values() if it.node == idle.back for failure in it.failures]
    assert any("node check: failed again" in text for text in seen)


async def test_a_check_that_cannot_be_done_harms_nothing_and_is_not_repeated(idle, monkeypatch):
    async def breaks(*_):
        raise UserError("node-3 cannot be checked: it trains gpt-a")

    monkeypatch.setattr(unasked_checks, "run_check", breaks)
    checked = {}
    await check_due(checked)
    assert idle.back in checked
    await check_due(checked)
    assert idle.agents.groups == {}


async def test_nobody_is_checked_if_that_is_the_policy_or_something_is_open_or_just_changed(idle):
    state = idle.journal.refresh()
    assert due_nodes(state, REJOINED, {}, NOW)[0] == idle.back
    assert due_nodes(state, frozenset(), {}, NOW) == ()
    assert due_nodes(state, REJOINED, {}, NOW - 100 + SETTLE_S - 1) == ()
    assert due_nodes(state, REJOINED, {idle.back: NOW}, NOW) == ()
    assert due_nodes(state, REJOINED, {}, NOW + FAILED_WITHIN_S) == ()
    idle.fail("f1")
    assert due_nodes(idle.journal.refresh(), REJOINED, {}, NOW) == ()


async def test_idle_checks_all_that_are_idle_once_a_day(idle):
    state = idle.journal.refresh()
    assert set(due_nodes(state, IDLE_TOO, {}, NOW + EVERY_S)) == set(idle.idle)
    checked = dict.fromkeys(idle.idle, NOW + EVERY_S)
    assert due_nodes(state, IDLE_TOO, checked, NOW + EVERY_S + 1) == ()


async def test_a_node_that_is_isolated_is_left_so(idle):
    """Being cleared would release it, and that is for a person, who asks for the check."""
    idle.journal.append(NodeQuarantined(id="q", at=NOW - 90, node=idle.back, reason="isolated by a person: noisy"))
    await idle.respond()
    assert idle.back not in due_nodes(idle.journal.refresh(), IDLE_TOO, {}, NOW + EVERY_S)


async def test_a_node_that_passed_any_check_is_not_due_although_this_process_knows_of_none(idle):
    """The journal tells of checks that a person asked for, and of those before the service was started anew."""
    await checking.check(response.plain, idle.idle, 1.0)
    state = idle.journal.refresh()
    assert all(state.nodes[name].checked_at for name in idle.idle)
    now = max(node.checked_at for node in state.nodes.values()) + 1
    assert due_nodes(state, IDLE_TOO, {}, now) == ()
    assert set(due_nodes(state, IDLE_TOO, {}, now + EVERY_S)) == set(idle.idle)


def test_the_setting_is_some_of_three_words_or_never(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length-000000000")
    env = {"UNICRON_STORE_URL": "s", "UNICRON_CONTROLLER_URL": "c", "UNICRON_TOKEN_FILE": str(token)}
    for text, when in (("", {"rejoined"}), ("never", set()), ("idle", {"idle"}), ("launch, rejoined", {"launch", "rejoined"})):
        assert Settings.from_env({**env, "UNICRON_CHECK_NODES": text}).check_nodes == when
    for text, wrong in (("always", "always"), ("never,idle", "never")):
        with pytest.raises(UserError, match=f"has '{wrong}': choose never, or some of rejoined, launch, idle"):
            Settings.from_env({**env, "UNICRON_CHECK_NODES": text})
