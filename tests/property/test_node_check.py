"""The node check against random truths: whom it may call what, and how many turns it takes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.diagnosis.node_check import (
    CheckVerdict,
    DeviceFault,
    Finding,
    Meeting,
    Report,
    next_groups,
    verdicts,
)

USUAL_S, SLOW_S = 0.2, 0.9


def check(nodes, faulty=(), slow=(), absent=(), broken=()) -> tuple[dict[str, Finding], list[Meeting]]:
    """The whole check of `nodes`: an exchange fails if one of the `faulty` takes part, and is slow with one of the `slow`."""
    meetings: list[Meeting] = []
    turn = 0
    while groups := next_groups(nodes, meetings):
        assert len({name for group in groups for name in group}) == sum(map(len, groups)), "nobody is at two places"
        meetings += [Meeting(turn=turn, reports=tuple(_reports(group, faulty, slow, absent, broken))) for group in groups]
        turn += 1
        assert turn < 200
    return verdicts(nodes, meetings), meetings


def _reports(group, faulty, slow, absent, broken):
    exchanged = not set(group) & {*faulty, *absent}
    gather_s = (SLOW_S if set(group) & set(slow) else USUAL_S) * (len(group) - 1)
    for name in group:
        faults = (DeviceFault(device="cuda:1", test="memory", text="3 bytes differ"),) if name in broken else ()
        yield Report(node=name, exchanged=exchanged, gather_s=gather_s, absent=name in absent, faults=faults)


def called(found, verdict):
    return {name for name, finding in found.items() if finding.verdict is verdict}


truths = st.integers(2, 64).flatmap(
    lambda size: st.tuples(st.just([f"n{i:02d}" for i in range(size)]), st.sets(st.integers(0, size - 1)))
)


@settings(deadline=None)
@given(truths)
def test_exact_whenever_two_nodes_are_healthy(truth):
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    found, _ = check(nodes, faulty)
    if len(nodes) - len(faulty) >= 2:
        assert called(found, CheckVerdict.FAULTY) == faulty
        assert called(found, CheckVerdict.GOOD) == set(nodes) - faulty
    else:
        assert called(found, CheckVerdict.UNDETERMINED) == set(nodes), "no healthy pair: nobody is accused"


@pytest.mark.parametrize("seed", range(100))
def test_64_nodes_need_three_turns_while_a_third_is_faulty(seed):
    chance = random.Random(seed)
    nodes = [f"n{i:02d}" for i in range(64)]
    faulty = set(chance.sample(nodes, chance.randint(0, 21)))
    found, meetings = check(nodes, faulty)
    assert called(found, CheckVerdict.FAULTY) == faulty
    assert max(meeting.turn for meeting in meetings) <= 2


@settings(deadline=None)
@given(truths, st.data())
def test_who_is_slow_is_told_apart_from_who_is_faulty(truth, data):
    """As long as more pairs of the first wave are of the usual pace than not."""
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    passing = [m for m in check(nodes, faulty)[1] if m.turn == 0 and m.passed]
    some = data.draw(st.sets(st.sampled_from(range(len(passing))))) if passing else set()
    slow = {passing[i].nodes[0] for i in sorted(some)[: (len(passing) - 1) // 2]}
    found, _ = check(nodes, faulty, slow)
    if passing:
        assert called(found, CheckVerdict.STRAGGLER) == slow
        assert called(found, CheckVerdict.FAULTY) == faulty


@settings(deadline=None)
@given(truths, st.data())
def test_who_does_not_come_is_not_judged_and_its_partner_still_is(truth, data):
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    absent = data.draw(st.sets(st.sampled_from(nodes)))
    found, _ = check(nodes, faulty, absent=absent)
    assert absent <= called(found, CheckVerdict.UNDETERMINED)
    healthy = set(nodes) - faulty - absent
    if len(healthy) >= 2:
        assert called(found, CheckVerdict.GOOD) == healthy
        assert called(found, CheckVerdict.FAULTY) == faulty - absent


def test_a_broken_device_is_the_nodes_own_fault_and_not_its_partners():
    found, _ = check(["a", "b"], broken={"a"})
    assert (found["a"].verdict, found["b"].verdict) == (CheckVerdict.FAULTY, CheckVerdict.GOOD)
    assert found["a"].reason == "memory test on cuda:1: 3 bytes differ"


def test_a_broken_device_is_no_reference_for_others():
    found, _ = check(["a", "b", "c", "d"], faulty={"b"}, broken={"a", "c"})
    assert called(found, CheckVerdict.GOOD) == {"d"}
    assert called(found, CheckVerdict.FAULTY) == {"a", "b", "c"}


def test_a_node_alone_proves_nothing_but_its_own_devices():
    found, _ = check(["a"])
    assert found["a"].verdict is CheckVerdict.UNDETERMINED
    assert "name an idle node beside it" in found["a"].reason
    assert check(["a"], broken={"a"})[0]["a"].verdict is CheckVerdict.FAULTY


def test_an_odd_one_makes_a_group_of_three():
    assert next_groups(["a", "b", "c", "d", "e"], []) == (("a", "b"), ("c", "d", "e"))
    assert next_groups([], []) == ()


def test_a_slow_matrix_product_is_the_nodes_own():
    reports = [Report(node=name, exchanged=True, gather_s=0.1, compute_s=took) for name, took in (("a", 0.2), ("b", 0.5))]
    found = verdicts(["a", "b"], [Meeting(turn=0, reports=tuple(reports))])
    assert found["b"].verdict is CheckVerdict.STRAGGLER
    assert found["b"].reason == "a matrix product took 0.5 s, 2.5 times as long as usual"
    assert found["a"].verdict is CheckVerdict.GOOD


def test_the_reasons_name_who_it_was_tried_with():
    found, _ = check(["a", "b", "c", "d"], faulty={"b"})
    assert found["b"].reason == "failed again, with d, which is good: data arrived damaged"
    assert found["a"].reason == "exchanged data with c intact, in 0.2 s"
    assert (found["b"].meetings, found["d"].meetings) == ((0, 1), (0, 1))
