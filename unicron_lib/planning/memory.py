"""States in the host memory of nodes: who keeps a second copy, and which one a generation begins from. Pure.

A generation may begin from parts that another layout has cut the state into: each of its own needs those that overlap it.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.parts import overlapping, replica_with
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.holding import MOST_IN_VAIN

Place = tuple[int, int]
"""Generation and iteration of a state."""
MOST_PEERS = 3
Homes = Mapping[str, Sequence[str]]
"""The nodes whose ranks have each part of a state, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A whole state of a job, or a `part` of one, in the memory of `node`."""

    node: str
    place: Place
    num_bytes: int
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """The node `to` copies a state, or a `part` of one, from the first of `holders`."""

    to: str
    holders: tuple[str, ...]
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource:
    """What a generation begins from, of `num_bytes` in all: its nodes `on` have it, or parts of it, and the rest is fetched.

    It was kept by replicas of `layout`.
    """

    place: Place
    num_bytes: int
    on: tuple[str, ...]
    fetches: tuple[Fetch, ...] = ()
    layout: Layout = field(default_factory=Layout)


def may_begin_from_memory(job: JobState) -> bool:
    """Whether slots are worth asking for: of a training that went on before, and has not failed again and again with them."""
    is_kept = job.spec.memory_interval != 0 and not job.spec.command
    return is_kept and job.restored and job.rolled_back_to is None and job.stuck_restarts < MOST_IN_VAIN


def is_kept(job: JobState, homes: Homes, answering: Collection[str]) -> bool:
    """Whether a state of the job, whose parts were at `homes`, is likely to be in the memory of nodes that answer.

    Ranks keep their own node's slots, and of a part that is on one node only another one has a copy, unless that is lost, too.
    """
    if not homes or not answering or not may_begin_from_memory(job):
        return False
    is_one_lost = len({node for nodes in homes.values() for node in nodes}.difference(answering)) <= 1
    return all(not set(nodes).isdisjoint(answering) or (len(nodes) == 1 and is_one_lost) for nodes in homes.values())


def choose(
    slots: Iterable[HeldSlot], homes: Homes, *, floor: int, saved: Place | None, racks: Mapping[str, str]
) -> MemorySource | None:
    """The furthest state, then the nearest copy of each of its parts; None if the store's is better.

    Slots of generations below `floor` count no more. `saved` is the place of the newest checkpoint that counts: what has gone
    on since, in its generation or a later one, is better, and the same state is nearer. Each part of the new generation, whose
    nodes are its `homes`, comes to one of them at least, which the others copy it from.
    """
    usable = [slot for slot in slots if slot.place[0] >= floor and _is_better(slot.place, saved)]
    own = replica_with(next(iter(homes)))
    found = max(_complete(usable), key=lambda it: (it[0], it[1] == own, it[1].shape), default=None)
    if found is None:
        return None
    place, layout = found
    best = [slot for slot in usable if slot.place == place and slot.part in layout.parts]
    sizes = {slot.part: slot.num_bytes for slot in best}
    held = {(slot.node, slot.part) for slot in best}
    wanted = {part: overlapping(part, layout) for part in homes}
    fetches = tuple(_fetches(wanted, homes, held, racks))
    there = held.union((it.to, it.part) for it in fetches)
    used = (
        (node, it)
        for part, nodes in homes.items()
        for node in nodes
        if there.issuperset((node, it) for it in wanted[part])
        for it in wanted[part]
    )
    on = dict.fromkeys(node for node, it in used if (node, it) in held)
    return MemorySource(place=place, num_bytes=sum(sizes.values()), on=tuple(on), fetches=fetches, layout=layout)


def _complete(slots: Iterable[HeldSlot]) -> list[tuple[Place, Layout]]:
    """The places of which there are all parts that a layout has."""
    had: dict[tuple[Place, Layout], set[str]] = defaultdict(set)
    for slot in slots:
        if layout := replica_with(slot.part):
            had[slot.place, layout].add(slot.part)
    return [key for key, parts in had.items() if len(parts) == key[1].replica_size]


def _fetches(wanted: Homes, homes: Homes, held: Collection[tuple[str, str]], racks: Mapping[str, str]) -> Iterator[Fetch]:
    """What each part's nearest home still lacks: the one that has the most of it, or is to get it for another part anyway."""
    there = set(held)
    for part, nodes in homes.items():
        lacking = {node: [it for it in wanted[part] if (node, it) not in there] for node in nodes}
        to = min(nodes, key=lambda node: len(lacking[node]))
        for it in lacking[to]:
            there.add((to, it))
            yield _fetch(it, to, [node for node, of in held if of == it], racks)


def _fetch(part: str, to: str, holders: Collection[str], racks: Mapping[str, str]) -> Fetch:
    return Fetch(part=part, to=to, holders=tuple(sorted(holders, key=lambda node: (_is_far(node, to, racks), node))))


def _is_better(place: Place, saved: Place | None) -> bool:
    return saved is None or place == saved or (place[0] >= saved[0] and place[1] > saved[1])


def _is_far(node: str, other: str, racks: Mapping[str, str]) -> bool:
    rack = racks.get(node, "")
    return not rack or rack != racks.get(other, "")


def lacks_copies(homes: Homes) -> bool:
    """Whether there is a part of the state that no second node of the job has."""
    return any(len(nodes) == 1 for nodes in homes.values())


def peers_of(
    job: str, home: str, others: Collection[str], racks: Mapping[str, str], busy: Collection[str] = ()
) -> tuple[str, ...]:
    """Who may keep a copy of what `home` keeps for a job, the best first, of `others`.

    Another rack is better: one switch, or one power supply, takes a rack; and so is who is not `busy` with the job itself. Jobs
    on one node choose different peers.
    """
    candidates = (node for node in others if node != home)
    ranked = sorted(candidates, key=lambda node: (_shares_rack(node, home, racks), node in busy, _draw(job, node)))
    return tuple(ranked[:MOST_PEERS])


def _shares_rack(node: str, home: str, racks: Mapping[str, str]) -> bool:
    return bool(racks.get(home)) and racks.get(node) == racks.get(home)


def _draw(job: str, node: str) -> bytes:
    return hashlib.sha256(f"{job}\0{node}".encode()).digest()
