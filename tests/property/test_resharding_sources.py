"""Whatever layouts, nodes and losses: what is fetched is the whole state of one iteration, where it is needed, or none is."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.checkpointing.model_state import slices_at
from unicron_lib.checkpointing.slices import TensorSlice, covered
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parts import overlapping, place_of, replica_with
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.memory import HeldSlot, choose

SPEC = JobSpec(job="a", num_layers=12, hidden_size=24, num_attention_heads=12, seq_length=3, vocab_size=264)
NODES = ("n1", "n2", "n3", "n4", "n5")
layouts = st.builds(Layout, tp=st.sampled_from([1, 2, 3, 4, 6]), pp=st.sampled_from([1, 2, 3, 4, 6]))
Held = dict[str, set[str]]


def named(layout: Layout, part: str) -> set[tuple[str, TensorSlice]]:
    return set(slices_at(SPEC, layout, place_of(part)).items())


@given(own=layouts, other=layouts)
def test_overlapping_parts_have_every_element_and_no_other_part_is_needed(own: Layout, other: Layout) -> None:
    for part in own.parts:
        assert replica_with(part) == own
        wanted, parts = slices_at(SPEC, own, place_of(part)), overlapping(part, other)
        had = set().union(*(named(other, it) for it in parts))
        for name, piece in wanted.items():
            assert covered(piece, [it for of, it in had if of == name]) == piece.num_elements, (part, name)
        for it in parts:
            rest = set().union(*(named(other, another) for another in parts if another != it))
            lacking = [
                name
                for name, piece in wanted.items()
                if covered(piece, [held for of, held in rest if of == name]) < piece.num_elements
            ]
            assert lacking, (part, it)


@given(st.text(alphabet="tp0123of-", max_size=20) | st.from_regex(r"tp\d{1,7}of\d{1,7}-pp\d{1,7}of\d{1,7}", fullmatch=True))
def test_only_names_of_parts_are_parts(name: str) -> None:
    layout = replica_with(name)
    assert layout is None or not name or layout.part(place_of(name).pp * layout.tp + place_of(name).tp) == name


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[HeldSlot], dict[str, tuple[str, ...]]]:
    """Ranks of some layout have kept two iterations, some with copies; nodes are lost; another layout is to go on."""
    old, new = draw(layouts), draw(layouts)
    some = st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True)
    lost = set(draw(st.lists(st.sampled_from(NODES), max_size=3)))
    held = [
        HeldSlot(node=node, place=(2, iteration), num_bytes=10, part=part)
        for part in old.parts
        for iteration in (6, 8)
        for node in draw(some)
        if node not in lost
    ]
    return held, {part: tuple(draw(some)) for part in new.parts}


@settings(max_examples=200)
@given(worlds(), st.sampled_from([None, (2, 5), (2, 6), (2, 7), (2, 8), (2, 9)]))
def test_complete_and_where_it_is_needed_or_from_the_store(world, saved: tuple[int, int] | None) -> None:
    slots, homes = world
    source = choose(slots, homes, floor=0, saved=saved, racks={"n1": "r", "n2": "r"})
    parts = defaultdict(set)
    for slot in slots:
        parts[slot.place].add(slot.part)
    whole = [
        place
        for place, names in parts.items()
        if len(names) == replica_with(next(iter(names))).replica_size
        if saved is None or place == saved or place[1] > saved[1]
    ]
    assert (source.place if source else None) == max(whole, default=None)
    if source is None:
        return
    there: Held = defaultdict(set)
    for slot in slots:
        if slot.place == source.place:
            there[slot.node].add(slot.part)
    before = {node: set(names) for node, names in there.items()}
    for fetch in source.fetches:
        assert fetch.holders
        assert all(fetch.part in before[holder] for holder in fetch.holders)
        assert fetch.part not in there[fetch.to], "nothing comes twice, or to who has it"
        there[fetch.to].add(fetch.part)
    needed: Held = defaultdict(set)
    for part, nodes in homes.items():
        wanted = set(overlapping(part, source.layout))
        assert any(wanted <= there[node] for node in nodes), part
        for node in nodes:
            needed[node] |= wanted
    assert all(fetch.part in needed[fetch.to] for fetch in source.fetches)
