"""Which rank lives on which GPU when replicas are several ranks."""

from unicron_lib.domain.plans import Assignment, Layout, Slot
from unicron_lib.planning.seating import seat


def on(*places: str) -> tuple[Slot, ...]:
    return tuple(Slot(place[0], int(place[1:])) for place in places)


def held(layout: Layout, *places: str) -> Assignment:
    return Assignment(job="a", generation=1, layout=layout, slots=on(*places))


def test_replicas_of_one_rank_stay_in_the_order_of_nodes() -> None:
    assert seat(on("a0", "a1"), Layout(dp=2), held(Layout(dp=2), "a1", "a0")) == on("a0", "a1")


def test_without_a_past_or_with_another_cut_ranks_are_numbered_along_the_nodes() -> None:
    slots = on("a0", "a1", "b0", "b1")
    assert seat(slots, Layout(tp=2, dp=2), None) == slots
    assert seat(slots, Layout(tp=2, dp=2), held(Layout(pp=2, dp=2), "b1", "b0", "a1", "a0")) == slots


def test_whole_replicas_come_first_and_keep_their_order() -> None:
    before = held(Layout(tp=2, dp=3), "a0", "a1", "b1", "b0", "c0", "c1")
    assert seat(on("b0", "b1", "c0", "c1", "d0", "d1"), Layout(tp=2, dp=3), before) == on("b1", "b0", "c0", "c1", "d0", "d1")
    assert seat(on("b0", "b1"), Layout(tp=2), before) == on("b1", "b0")


def test_a_rank_of_a_broken_replica_keeps_its_slice() -> None:
    before = held(Layout(tp=2, dp=2), "a0", "a1", "b0", "b1")
    assert seat(on("a0", "a1", "b1", "b2"), Layout(tp=2, dp=2), before) == on("a0", "a1", "b2", "b1")


def test_a_rank_of_a_broken_replica_keeps_its_stage() -> None:
    before = held(Layout(pp=2, dp=2), "a0", "b0", "c0", "d0")
    assert seat(on("b0", "c0"), Layout(pp=2), before) == on("c0", "b0")
    assert seat(on("a0", "d0"), Layout(pp=2), before) == on("a0", "d0")
    assert seat(on("b0", "d0"), Layout(pp=2), before) == on("d0", "b0")


def test_lines_stay_on_their_nodes() -> None:
    before = held(Layout(tp=2, pp=2, dp=2), "a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1")
    found = seat(on("b0", "b1", "c0", "c1", "e0", "e1", "e2", "e3"), Layout(tp=2, pp=2, dp=2), before)
    assert found == on("c0", "c1", "b0", "b1", "e0", "e1", "e2", "e3")
    assert all(found[first].node == found[first + 1].node for first in range(0, 8, 2))
