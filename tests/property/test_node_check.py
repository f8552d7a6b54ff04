"""The node check against random truths: whom it may call what, and how many turns it takes."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.diagnosis.check_waves import MAX_WAVES, next_groups
from unicron_lib.diagnosis.node_check import CheckVerdict, DeviceFault, Finding, Meeting, Report, verdicts

USUAL_S, SLOW_S = 0.2, 0.9


def check(nodes, faulty=(), slow=(), absent=(), broken=()) -> tuple[dict[str, Finding], list[Meeting]]:
    """The whole check of `nodes`: an exchange fails if one of the `faulty` takes part, and is slow with one of the `slow`."""
    meetings: list[Meeting] = []
    turn = 0
    while groups := next_groups(nodes, meetings):
        assert len({name for group in groups for name in group}) == sum(map(len, groups)), "nobody is at two places"
        meetings += [Meeting(turn=turn, reports=tuple(_reports(group, faulty, slow, absent, broken))) for group in groups]
        turn += 1
        assert turn <= MAX_WAVES == 3
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


at_most_a_third = st.integers(2, 64).flatmap(
    lambda size: st.tuples(st.just([f"n{i:02d}" for i in range(size)]), st.sets(st.integers(0, size - 1), max_size=size // 3))
)
"""Such a number of bad nodes that all of them are found in three waves."""


@settings(deadline=None)
@given(truths)
def test_whatever_the_share_of_the_faulty_nobody_is_judged_wrongly(truth):
    """Three waves at most, as `check` asserts; who is not told apart by then is undetermined."""
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    found, _ = check(nodes, faulty)
    assert called(found, CheckVerdict.FAULTY) <= faulty
    assert called(found, CheckVerdict.GOOD) <= set(nodes) - faulty
    assert not called(found, CheckVerdict.STRAGGLER)
    if len(nodes) - len(faulty) < 2:
        assert called(found, CheckVerdict.UNDETERMINED) == set(nodes), "no healthy pair: nobody is accused"


@settings(deadline=None)
@given(at_most_a_third)
def test_exact_while_at_most_a_third_is_faulty(truth):
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    found, _ = check(nodes, faulty)
    assert called(found, CheckVerdict.FAULTY) == faulty
    assert called(found, CheckVerdict.GOOD) == set(nodes) - faulty


@pytest.mark.parametrize("size", range(2, 11))
def test_exact_for_every_choice_of_a_third_of_few_nodes(size):
    nodes = [f"n{i}" for i in range(size)]
    for faulty in map(set, itertools.combinations(nodes, size // 3)):
        found, _ = check(nodes, faulty)
        assert (called(found, CheckVerdict.FAULTY), called(found, CheckVerdict.UNDETERMINED)) == (faulty, set()), faulty


@pytest.mark.parametrize("num_faulty", range(0, 65, 4))
def test_64_nodes_with_any_share_of_faulty_ones_meet_three_times_at_most(num_faulty):
    nodes = [f"n{i:02d}" for i in range(64)]
    faulty = set(random.Random(num_faulty).sample(nodes, num_faulty))
    found, _ = check(nodes, faulty)
    assert called(found, CheckVerdict.FAULTY) <= faulty
    assert not called(found, CheckVerdict.GOOD) & faulty
    if num_faulty <= 25:
        assert called(found, CheckVerdict.FAULTY) == faulty


def test_with_few_good_ones_several_suspects_are_cleared_at_once():
    """Two have proved good, three suspects may yet be cleared; and a fourth is convicted by what comes of that."""
    found, meetings = check([f"n{i}" for i in range(9)], faulty={"n0", "n1", "n2", "n4"})
    assert [meeting.nodes for meeting in meetings if meeting.turn == 2] == [("n3", "n8", "n6"), ("n5", "n7")]
    assert called(found, CheckVerdict.GOOD) == {"n3", "n5", "n6", "n7", "n8"}
    assert called(found, CheckVerdict.FAULTY) == {"n0", "n1", "n2", "n4"}


@settings(deadline=None)
@given(at_most_a_third, st.data())
def test_who_is_slow_is_told_apart_from_who_is_faulty(truth, data):
    """As long as more pairs of the first wave are of the usual pace than not."""
    nodes, bad = truth
    faulty = {nodes[i] for i in bad}
    passing = [m for m in check(nodes, faulty)[1] if m.turn == 0 and m.passed]
    some = data.draw(st.sets(st.sampled_from(range(len(passing))))) if passing else set()
    most = min((len(passing) - 1) // 2, len(nodes) // 3 - len(faulty))
    slow = {passing[i].nodes[0] for i in sorted(some)[: max(0, most)]}
    found, _ = check(nodes, faulty, slow)
    if passing:
        assert called(found, CheckVerdict.STRAGGLER) == slow
        assert called(found, CheckVerdict.FAULTY) == faulty


@settings(deadline=None)
@given(at_most_a_third, st.data())
def test_who_does_not_come_is_not_judged_and_its_partner_still_is(truth, data):
    nodes, bad = truth
    absent = {nodes[i] for i in bad if data.draw(st.booleans())}
    faulty = {nodes[i] for i in bad} - absent
    found, _ = check(nodes, faulty, absent=absent)
    assert called(found, CheckVerdict.UNDETERMINED) == absent
    assert called(found, CheckVerdict.GOOD) == set(nodes) - faulty - absent
    assert called(found, CheckVerdict.FAULTY) == faulty


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
    assert next_groups(["a", "b", "c"], []) == (("a", "b"),), "the third one meets one of them next, whatever comes of it"
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
