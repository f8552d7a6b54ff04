"""Placement under rules, against brute force on small clusters and against what no placement can beat."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot
from unicron_lib.planning import packing, placement, placement_model
from unicron_lib.planning.packing import Counts, Move, Problem, Score, Spot
from unicron_lib.planning.placement import CannotBePlaced, Method, Rules, arrange


def node(index: int, num_gpus: int, rack: str = "") -> Node:
    return Node(id=f"node-{index:02}", boot="b", address="a", num_gpus=num_gpus, rack=rack)


def slots(*names: str) -> tuple[Slot, ...]:
    return tuple(Slot(f"node-0{name[0]}", int(name[1])) for name in names)


@st.composite
def problems(draw: st.DrawFn, *, limited: bool = True) -> Problem:
    """Few small nodes, jobs that hold something and want something, groups of 1 or 2."""
    names = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    rooms = {name: draw(st.integers(0, 4)) for name in names}
    racks = {name: draw(st.sampled_from(["", "r0", "r1", "r2"])) for name in names}
    seats = {name: draw(st.sampled_from([None, 1, 2])) if limited else None for name in names}
    free, left = dict(rooms), sum(rooms.values())
    moves = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([1, 1, 2]))
        held = {name: size * draw(st.integers(0, free[name] // size)) for name in names}
        for name, number in held.items():
            free[name] -= number
        num_gpus = size * draw(st.integers(0, left // size))
        left -= num_gpus
        held = {name: number for name, number in held.items() if number}
        moves.append(Move(job=f"job-{index}", num_gpus=num_gpus, group_gpus=size, held=held))
    spots = {name: Spot(rack=racks[name], room=rooms[name], seats=seats[name]) for name in names}
    return Problem(spots=spots, moves=tuple(moves))


def arrangements(problem: Problem) -> Iterator[Counts]:
    """All that keep to the rules."""
    names = list(problem.spots)
    ways = [
        [
            dict(zip(names, numbers, strict=True))
            for numbers in itertools.product(*(range(0, problem.spots[name].room + 1, move.group_gpus) for name in names))
            if sum(numbers) == move.num_gpus
        ]
        for move in problem.moves
    ]
    for chosen in itertools.product(*ways):
        if all(keeps_rules(problem.spots[name], [way[name] for way in chosen]) for name in names):
            counts = [{name: number for name, number in way.items() if number} for way in chosen]
            yield {move.job: got for move, got in zip(problem.moves, counts, strict=True)}


def keeps_rules(spot: Spot, numbers: list[int]) -> bool:
    return sum(numbers) <= spot.room and (spot.seats is None or sum(map(bool, numbers)) <= spot.seats)


def brute_force(problem: Problem) -> Score | None:
    return min((packing.score(problem, counts) for counts in arrangements(problem)), default=None)


def check(problem: Problem, counts: Counts) -> None:
    for move in problem.moves:
        assert sum(counts[move.job].values()) == move.num_gpus
        assert all(number % move.group_gpus == 0 for number in counts[move.job].values())
    for name, spot in problem.spots.items():
        assert keeps_rules(spot, [counts[move.job].get(name, 0) for move in problem.moves])


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_what_is_certified_is_what_brute_force_finds(problem: Problem) -> None:
    best = brute_force(problem)
    if best is None:
        with pytest.raises(CannotBePlaced) as caught:
            placement._search(problem, 20.0)
        assert caught.value.proved
        return
    counts, certified, _ = placement._search(problem, 20.0)
    assert certified
    check(problem, counts)
    assert packing.score(problem, counts) == best
    assert packing.bound(problem) <= best


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_the_model_that_weighs_everything_agrees_with_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    found = placement_model.moving(problem, time_limit_s=20.0)
    assert found.proved
    assert (found.counts is None) == (best is None)
    if found.counts is not None:
        assert packing.score(problem, found.counts) == best


@settings(max_examples=200, deadline=None)
@given(problem=problems(limited=False))
def test_the_quick_way_moves_the_least_where_it_gets_through(problem: Problem) -> None:
    try:
        counts = packing.pack(problem)
    except packing.NoRoom:
        assert any(move.group_gpus > 1 for move in problem.moves)
        return
    check(problem, counts)
    assert packing.score(problem, counts).moved == packing.bound(problem).moved


@settings(max_examples=30, deadline=None)
@given(num_nodes=st.integers(4, 24), dice=st.randoms(use_true_random=False))
def test_a_model_of_racks_loses_nothing_against_one_of_nodes(num_nodes: int, dice: random.Random) -> None:
    moves, left = [], 4 * num_nodes
    for index in range(3):
        num_gpus = dice.randint(0, left)
        left -= num_gpus
        moves.append(Move(job=f"job-{index}", num_gpus=num_gpus, group_gpus=1, held={}))
    found = []
    for seats in (None, 9):  # which is no limit, but makes nodes count
        spots = {f"n{i:02}": Spot(rack=f"r{i % 4}", room=4, seats=seats) for i in range(num_nodes)}
        problem = Problem(spots=spots, moves=tuple(moves))
        by = placement_model.keeping(problem, time_limit_s=20.0)
        assert by.proved
        assert by.counts is not None
        check(problem, by.counts)
        found.append(packing.score(problem, by.counts))
    assert found[0] == found[1]


@given(sizes=st.lists(st.sampled_from([1, 2, 4, 8]), max_size=30))
def test_powers_of_two_always_pack(sizes: list[int]) -> None:
    nodes = [node(i, 8) for i in range(-(-sum(sizes) // 8))]
    wanted = {f"job-{i:02}": size for i, size in enumerate(sizes)}
    placed = arrange(wanted, {}, nodes, Rules(group_gpus=wanted))
    assert placed.certified
    assert all(len({slot.node for slot in held}) == 1 for held in placed.slots.values())


@settings(max_examples=60, deadline=None)
@given(dice=st.randoms(use_true_random=False), groups=st.sampled_from([1, 2]), limit=st.sampled_from([None, 2]))
def test_names_of_nodes_do_not_matter_and_who_does_not_change_is_left_alone(
    dice: random.Random, groups: int, limit: int | None
) -> None:
    """A cluster with a lost node, and the same with its nodes named the other way round."""
    nodes = [node(i, 4, f"r{i // 3}") for i in range(9)]
    sizes = {f"job-{i}": groups * dice.randint(1, 4) for i in range(4)}
    rules = Rules(group_gpus=dict.fromkeys(sizes, groups), max_jobs_per_node=limit)
    current = arrange(sizes, {}, nodes, rules).slots
    lost = dice.choice(nodes).id
    wanted = {job: size if dice.random() < 0.5 else groups * dice.randint(0, 4) for job, size in sizes.items()}
    renamed = {one.id: f"node-{8 - i:02}" for i, one in enumerate(nodes)}
    mirrored = {job: tuple(Slot(renamed[slot.node], slot.gpu) for slot in held) for job, held in current.items()}
    left = [one for one in nodes if one.id != lost]
    placed = arrange(wanted, current, left, rules)
    other = arrange(wanted, mirrored, [replace(one, id=renamed[one.id]) for one in left], rules)
    assert placed.certified
    assert other.certified
    assert (placed.moved, placed.racks) == (other.moved, other.racks)
    for job, held in current.items():
        if len(held) == wanted[job] and lost not in {slot.node for slot in held}:
            assert placed.slots[job] == held
    shared = Counter(name for held in placed.slots.values() for name in {slot.node for slot in held})
    assert limit is None or max(shared.values(), default=0) <= limit


def test_groups_never_span_nodes_and_ranks_of_a_group_are_neighbours() -> None:
    nodes = [node(0, 3), node(1, 3), node(2, 4)]
    placed = arrange({"a": 6, "b": 2}, {}, nodes, Rules(group_gpus={"a": 2}))
    held = placed.slots["a"]
    assert all(held[rank].node == held[rank + 1].node for rank in range(0, 6, 2))


def test_a_group_that_lost_a_gpu_is_not_kept_in_part() -> None:
    current = {"a": slots("00", "01", "10", "11")}
    placed = arrange({"a": 2}, current, [node(0, 2), node(1, 1)], Rules(group_gpus={"a": 2}))
    assert placed.slots["a"] == slots("00", "01")


def test_a_new_job_goes_into_the_one_rack_that_holds_it() -> None:
    nodes = [node(0, 2, "x"), node(1, 2, "y"), node(2, 2, "y"), node(3, 2, "x"), node(4, 2, "y")]
    placed = arrange({"a": 6, "b": 4}, {}, nodes)
    assert {slot.node for slot in placed.slots["a"]} == {"node-01", "node-02", "node-04"}
    assert (placed.racks, placed.certified, placed.method) == (2, True, Method.PACKED)


def test_the_solver_finds_the_racks_that_the_quick_way_misses() -> None:
    """Best fit puts 4 into the rack of 4; that leaves 3 + 3 nowhere but across, unlike 4 in the rack of 7."""
    nodes = [node(i, 1, "x" if i < 6 else "y") for i in range(10)]
    placed = arrange({"a": 4, "b": 3, "c": 3}, {}, nodes)
    assert (placed.racks, placed.certified) == (3, True)


def test_at_most_so_many_jobs_share_a_node() -> None:
    nodes = [node(i, 4) for i in range(3)]
    placed = arrange({"a": 1, "b": 1, "c": 1}, {}, nodes, Rules(max_jobs_per_node=1))
    assert Counter(slot.node for held in placed.slots.values() for slot in held) == dict.fromkeys(
        ("node-00", "node-01", "node-02"), 1
    )


def test_what_cannot_be_placed_is_said_with_the_job() -> None:
    with pytest.raises(CannotBePlaced, match="cannot be placed: no node has room") as caught:
        arrange({"a": 4}, {}, [node(0, 2), node(1, 2)], Rules(group_gpus={"a": 4}))
    assert (caught.value.job, caught.value.proved) == ("a", True)


def test_a_job_that_does_not_change_is_left_alone_even_where_it_is_in_the_way() -> None:
    current = {"a": slots("00", "10")}
    with pytest.raises(CannotBePlaced):
        arrange({"a": 2, "b": 2}, current, [node(0, 2), node(1, 2)], Rules(group_gpus={"b": 2}))
    assert arrange({"a": 2, "b": 2}, current, [node(0, 2), node(1, 2)]).slots["a"] == current["a"]


def test_the_quick_answer_asks_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(placement_model, "keeping", refuse)
    monkeypatch.setattr(placement_model, "moving", refuse)
    current = {"a": slots("00", "01", "10", "11"), "b": slots("20", "21")}
    placed = arrange({"a": 4, "b": 2}, current, [node(i, 2, "x") for i in range(1, 4)])
    assert (placed.moved, placed.certified, placed.method) == (2, True, Method.PACKED)


@pytest.mark.parametrize("found", [placement_model.Found(counts=None, proved=False)])
def test_a_solver_that_finds_nothing_leaves_the_quick_answer_uncertified(
    monkeypatch: pytest.MonkeyPatch, found: placement_model.Found
) -> None:
    monkeypatch.setattr(placement_model, "keeping", lambda *_, **__: found)
    monkeypatch.setattr(packing, "bound", lambda _: Score(moved=0, racks=0))
    placed = arrange({"a": 4}, {}, [node(0, 4, "x")])
    assert len(placed.slots["a"]) == 4
    assert (placed.certified, placed.method) == (False, Method.PACKED)
