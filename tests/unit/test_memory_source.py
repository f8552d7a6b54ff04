"""Which state in memory a generation begins from, and who keeps a second copy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.domain.jobs import JobSpec, JobState
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.memory import (
    Fetch,
    HeldSlot,
    MemorySource,
    choose,
    is_kept,
    lacks_copies,
    may_begin_from_memory,
    peers_of,
)

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": ""}


def slot(node: str, generation: int, iteration: int) -> HeldSlot:
    return HeldSlot(node=node, place=(generation, iteration), num_bytes=10)


def chosen(*slots: HeldSlot, nodes=("n1", "n2"), floor=0, saved=None):
    return choose(slots, {"": nodes}, floor=floor, saved=saved, racks=RACKS)


def test_without_slots_there_is_the_store() -> None:
    assert chosen() is None


def test_the_furthest_wins_however_far_away() -> None:
    source = chosen(slot("n1", 2, 40), slot("n2", 2, 40), slot("n3", 2, 41))
    assert (source.place, source.on, source.fetches) == ((2, 41), (), (Fetch(to="n1", holders=("n3",)),))


def test_of_equals_every_near_one_is_used() -> None:
    source = chosen(slot("n3", 2, 41), slot("n2", 2, 41), slot("n1", 2, 40))
    assert (source.place, source.on, source.fetches) == ((2, 41), ("n2",), ())


def test_the_holder_in_the_same_rack_is_asked_first() -> None:
    source = chosen(slot("n4", 2, 41), slot("n3", 2, 41), slot("n2", 2, 41), nodes=("n1",))
    assert source.fetches[0].holders == ("n2", "n3", "n4")


def test_who_went_on_later_counts_before_who_was_further() -> None:
    """Generation 3 went on elsewhere, from iteration 100: what generation 2 has kept at 148 is another branch."""
    assert chosen(slot("n1", 2, 148), slot("n3", 3, 120)).place == (3, 120)


@pytest.mark.parametrize("saved", [(2, 42), (3, 10), (3, 41), (3, 50)])
def test_a_committed_checkpoint_that_is_further_or_later_counts(saved) -> None:
    assert chosen(slot("n1", 2, 41), saved=saved) is None


@pytest.mark.parametrize("saved", [None, (2, 40), (1, 40), (2, 41)])
def test_what_went_on_since_the_checkpoint_counts_and_the_same_is_nearer(saved) -> None:
    assert chosen(slot("n1", 2, 41), saved=saved).place == (2, 41)


def test_what_a_job_went_back_from_counts_no_more() -> None:
    assert chosen(slot("n1", 3, 148), slot("n2", 4, 101), floor=4).place == (4, 101)
    assert chosen(slot("n1", 3, 148), floor=4) is None


places = st.tuples(st.integers(0, 5), st.integers(0, 30))
held = st.builds(lambda node, place: slot(node, *place), st.sampled_from(sorted(RACKS)), places)


@given(
    slots=st.lists(held, max_size=12),
    nodes=st.lists(st.sampled_from(sorted(RACKS)), min_size=1, unique=True),
    floor=st.integers(0, 5),
    saved=st.none() | places,
)
def test_never_backwards_and_always_from_somebody_who_has_it(slots, nodes, floor, saved) -> None:
    source = choose(slots, {"": nodes}, floor=floor, saved=saved, racks=RACKS)
    useful = [
        s.place
        for s in slots
        if s.place[0] >= floor
        if saved is None or s.place == saved or (s.place[0] >= saved[0] and s.place[1] > saved[1])
    ]
    assert (source is None) == (not useful)
    if source:
        assert source.place == max(useful)
        holders = {s.node for s in slots if s.place == source.place}
        assert set(source.on) == holders & set(nodes)
        assert [(it.to, set(it.holders)) for it in source.fetches] == ([] if source.on else [(nodes[0], holders)])
        assert saved is None or source.place[1] >= saved[1]


# --- parts

LINE = Layout(tp=2)
LEFT, RIGHT = LINE.parts
HOMES = {LEFT: ("n1", "n3"), RIGHT: ("n2",)}
NAMES = {"left": LEFT, "right": RIGHT}


def part(node: str, name: str, iteration: int, generation: int = 2) -> HeldSlot:
    return HeldSlot(node=node, place=(generation, iteration), num_bytes=10, part=NAMES.get(name, name))


def of_parts(*slots: HeldSlot):
    return choose(slots, HOMES, floor=0, saved=None, racks=RACKS)


def test_all_parts_are_of_the_furthest_iteration_that_there_are_all_of() -> None:
    source = of_parts(part("n1", "left", 8), part("n1", "left", 6), part("n2", "right", 6), part("n2", "right", 4))
    assert source == MemorySource(place=(2, 6), num_bytes=20, on=("n1", "n2"), layout=LINE)


def test_each_part_comes_to_a_node_that_needs_it() -> None:
    source = of_parts(part("n3", "left", 6), part("n2", "left", 6), part("n4", "right", 6), part("n1", "right", 6))
    assert source.on == ("n3",)
    assert source.fetches == (Fetch(part=RIGHT, to="n2", holders=("n1", "n4")),)


@pytest.mark.parametrize(
    "slots",
    [
        [part("n1", "left", 6)],
        [part("n1", "left", 6), part("n2", "right", 7)],
        [part("n1", "left", 6), part("n2", "right", 6, 1)],
        [part("n1", "left", 6), part("n2", "tp1of2-pp0of2", 6)],
        [part("n1", "left", 6), part("n2", "tp2of2-pp0of1", 6)],
        [part("n1", "left", 6), part("n2", "another", 6)],
    ],
    ids=["no second part", "another iteration", "another branch", "two layouts", "no place of a layout", "nobody's"],
)
def test_without_all_parts_there_is_the_store(slots: list[HeldSlot]) -> None:
    assert of_parts(*slots) is None


# --- parts of another layout


def held_by(node: str, layout: Layout, *numbers: int, iteration: int = 6) -> list[HeldSlot]:
    return [part(node, layout.parts[number], iteration) for number in numbers]


def test_stages_go_on_as_lines_with_no_more_than_each_node_needs() -> None:
    """The only node of the second stage is lost; the last one has a copy of it."""
    old = Layout(tp=2, pp=3)
    slots = [*held_by("n1", old, 0, 1), *held_by("n2", old, 2, 3, 4, 5)]
    source = choose(slots, {LEFT: ("n1", "n2"), RIGHT: ("n1", "n2")}, floor=0, saved=None, racks=RACKS)
    assert (source.place, source.layout, source.on, source.num_bytes) == ((2, 6), old, ("n2",), 60)
    assert source.fetches == (
        Fetch(part=old.parts[0], to="n2", holders=("n1",)),
        Fetch(part=old.parts[1], to="n2", holders=("n1",)),
    )


def test_each_stage_gets_the_layers_that_it_has() -> None:
    """One node had both lines of four layers, and is lost; a copy is at a node that takes no part."""
    stages = Layout(tp=2, pp=2)
    homes = {part: ("n1",) if number < 2 else ("n2",) for number, part in enumerate(stages.parts)}
    source = choose(held_by("n3", Layout(pp=4), 0, 1, 2, 3), homes, floor=0, saved=None, racks={})
    assert source.on == ()
    wanted = [("n1", 0), ("n1", 1), ("n2", 2), ("n2", 3)]
    assert [(it.to, it.part) for it in source.fetches] == [(node, Layout(pp=4).parts[number]) for node, number in wanted]


def test_whole_states_are_cut_where_they_are_and_parts_make_whole_ones() -> None:
    cut = choose([slot("n3", 2, 41), slot("n2", 2, 41)], HOMES, floor=0, saved=None, racks=RACKS)
    assert (cut.on, cut.fetches, cut.layout) == (("n3", "n2"), (), Layout())
    whole = choose(held_by("n2", LINE, 0, 1), {"": ("n1", "n2")}, floor=0, saved=None, racks=RACKS)
    assert (whole.on, whole.fetches, whole.layout) == (("n2",), (), LINE)


def test_what_went_on_further_counts_whatever_its_layout() -> None:
    slots = [*held_by("n1", LINE, 0, 1, iteration=8), *held_by("n2", Layout(pp=2), 0, 1, iteration=9), slot("n1", 2, 7)]
    assert of_parts(*slots).layout == Layout(pp=2)
    assert of_parts(*slots[:3], slot("n1", 2, 9)).layout == Layout()


# --- peers


def test_a_job_of_several_nodes_has_its_copies_already() -> None:
    assert not lacks_copies({"": ("n1", "n2")})
    assert lacks_copies({"": ("n1",)})
    assert lacks_copies({"first": ("n1", "n2"), "second": ("n2",)})


def test_another_rack_is_better() -> None:
    found = peers_of("a", "n1", ("n1", "n2", "n3", "n4"), RACKS)
    assert set(found) == {"n2", "n3", "n4"}
    assert found[-1] == "n2"


def test_who_has_ranks_of_the_job_is_asked_after_the_others() -> None:
    found = peers_of("a", "n1", ("n1", "n2", "n3", "n4"), {}, busy=("n1", "n3"))
    assert (set(found), found[-1]) == ({"n2", "n3", "n4"}, "n3")


def test_alone_there_is_nobody() -> None:
    assert peers_of("a", "n1", ("n1",), RACKS) == ()


def test_jobs_spread_and_each_choice_stays() -> None:
    nodes = [f"n{number}" for number in range(20)]
    first = [peers_of(f"job-{number}", "n0", nodes, {})[0] for number in range(60)]
    assert len(set(first)) > 10
    assert first == [peers_of(f"job-{number}", "n0", reversed(nodes), {})[0] for number in range(60)]


# --- whether at all

READY = JobState(spec=JobSpec(job="a"), restored=True)


def test_a_training_that_goes_on_may() -> None:
    assert may_begin_from_memory(READY)


@pytest.mark.parametrize(
    "changed",
    [
        {"restored": False},
        {"rolled_back_to": 7},
        {"stuck_restarts": 2},
        {"spec": JobSpec(job="a", memory_interval=0)},
        {"spec": JobSpec(job="a", command=("true",))},
    ],
)
def test_others_may_not(changed) -> None:
    assert not may_begin_from_memory(replace(READY, **changed))


@pytest.mark.parametrize(
    ("homes", "answering", "expected"),
    [
        ({"": ("n1", "n2")}, {"n2", "n3"}, True),
        ({"": ("n1", "n2")}, {"n3"}, False),
        ({"": ("n1",)}, {"n1"}, True),
        ({"": ("n1",)}, {"n3"}, True),
        ({"": ("n1",)}, set(), False),
        ({}, {"n1"}, False),
        (HOMES, {"n2", "n3"}, True),
        (HOMES, {"n1", "n3"}, True),
        (HOMES, {"n1", "n4"}, False),
    ],
)
def test_a_state_outlives_its_ranks_on_their_nodes_and_what_one_has_alone_on_a_peer(homes, answering, expected) -> None:
    spec = JobSpec(job="a")
    assert is_kept(JobState(spec=spec, restored=True), homes, answering) is expected
    assert not is_kept(JobState(spec=spec), homes, answering)
    assert not is_kept(JobState(spec=replace(spec, memory_interval=0), restored=True), homes, answering)
