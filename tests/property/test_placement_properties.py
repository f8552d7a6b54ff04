"""Placement: everything fits, nobody moves without need."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot
from unicron_lib.planning.placement import place


def node(index: int, num_gpus: int) -> Node:
    return Node(id=f"node-{index:02}", boot="b", address="a", num_gpus=num_gpus)


def slots(*names: str) -> tuple[Slot, ...]:
    return tuple(Slot(f"node-0{name[0]}", int(name[1])) for name in names)


FOUR = [node(i, 2) for i in range(4)]

Case = tuple[dict[str, int], dict[str, tuple[Slot, ...]], list[Node]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Jobs somewhere on a cluster, some nodes of which are gone, and sizes that fit on the rest."""
    before = [node(i, draw(st.integers(1, 8))) for i in range(draw(st.integers(1, 6)))]
    pool = draw(st.permutations([slot for one in before for slot in one.slots]))
    current: dict[str, tuple[Slot, ...]] = {}
    for index in range(draw(st.integers(0, 4))):
        share = draw(st.integers(0, len(pool)))
        current[f"job-{index}"], pool = tuple(pool[:share]), pool[share:]
    nodes = draw(st.lists(st.sampled_from(before), unique_by=lambda one: one.id))
    left = sum(one.num_gpus for one in nodes)
    wanted: dict[str, int] = {}
    for job in [*current, "job-new"]:
        keep = len(current.get(job, ()))
        wanted[job] = keep if keep <= left and draw(st.booleans()) else draw(st.integers(0, left))
        left -= wanted[job]
    return wanted, current, nodes


@given(case=cases())
def test_everyone_gets_its_number_and_no_gpu_is_given_twice(case: Case) -> None:
    wanted, current, nodes = case
    placed = place(wanted, current, nodes)
    offered = {slot for one in nodes for slot in one.slots}
    given_out = [slot for held in placed.values() for slot in held]
    assert {job: len(held) for job, held in placed.items()} == wanted
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= offered


@given(case=cases())
def test_as_many_stay_as_can(case: Case) -> None:
    wanted, current, nodes = case
    placed = place(wanted, current, nodes)
    offered = {slot for one in nodes for slot in one.slots}
    for job, held in placed.items():
        surviving = offered.intersection(current.get(job, ()))
        assert len(surviving.intersection(held)) == min(wanted[job], len(surviving))
        if len(surviving) == len(current.get(job, ())) == wanted[job]:
            assert held == current.get(job, ())


@given(case=cases())
def test_ranks_on_a_node_are_neighbours_when_a_job_moves(case: Case) -> None:
    wanted, current, nodes = case
    for job, held in place(wanted, current, nodes).items():
        if held != current.get(job):
            assert list(held) == sorted(held)


@given(case=cases())
def test_the_order_in_which_jobs_and_nodes_are_listed_does_not_matter(case: Case) -> None:
    wanted, current, nodes = case
    backwards = place(dict(reversed(wanted.items())), current, list(reversed(nodes)))
    assert backwards == place(wanted, current, nodes)


@given(sizes=st.lists(st.integers(0, 3), max_size=6))
def test_new_jobs_of_whole_nodes_get_whole_nodes(sizes: list[int]) -> None:
    nodes = [node(i, 4) for i in range(sum(sizes) + 1)]
    placed = place({f"job-{i}": 4 * size for i, size in enumerate(sizes)}, {}, nodes)
    for held in placed.values():
        assert set(Counter(slot.node for slot in held).values()) <= {4}


def test_a_job_that_shrinks_keeps_a_whole_node() -> None:
    assert place({"a": 2}, {"a": slots("01", "10", "11")}, FOUR) == {"a": slots("10", "11")}


def test_a_job_that_grows_first_fills_the_node_where_it_is() -> None:
    assert place({"a": 2}, {"a": slots("21")}, FOUR) == {"a": slots("20", "21")}
    beside = {"a": slots("00", "01"), "b": slots("10", "11", "12")}
    assert place({"a": 3, "b": 3}, beside, [node(0, 4), node(1, 4)])["a"] == slots("00", "01", "02")


def test_a_small_job_does_not_break_into_a_free_node_while_a_broken_one_fits() -> None:
    assert place({"a": 3, "b": 1}, {"a": slots("20", "21", "30")}, FOUR)["b"] == slots("31")


def test_whoever_lost_a_node_keeps_the_rest() -> None:
    placed = place({"a": 4, "b": 2}, {"a": slots("00", "01", "10", "11"), "b": slots("20", "21", "30", "31")}, FOUR[1:])
    assert placed == {"a": slots("10", "11", "30", "31"), "b": slots("20", "21")}


def test_more_than_there_is_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="9 GPUs are wanted, the nodes have 8"):
        place({"a": 9}, {}, FOUR)
