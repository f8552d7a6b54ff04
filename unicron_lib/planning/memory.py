"""States in the host memory of nodes: who keeps a second copy, and which one a generation begins from. Pure."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_lib.domain.jobs import JobState
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
    """What a generation begins from, of `num_bytes` in all: its nodes `on` have it, or parts of it, and the rest is fetched."""

    place: Place
    num_bytes: int
    on: tuple[str, ...]
    fetches: tuple[Fetch, ...] = ()


def may_begin_from_memory(job: JobState) -> bool:
    """Whether slots are worth asking for: of a training that went on before, and has not failed again and again with them."""
    is_kept = job.spec.memory_interval != 0 and not job.spec.command
    return is_kept and job.restored and job.rolled_back_to is None and job.stuck_restarts < MOST_IN_VAIN


def is_kept(job: JobState, nodes: Collection[str], answering: Collection[str]) -> bool:
    """Whether a state of the job, which was on `nodes`, is in the memory of one of those that answer.

    Ranks keep their own node's slots; of a job on one node, and of parts that are on one node only, another one has a copy.
    """
    if not nodes or not may_begin_from_memory(job):
        return False
    return bool(answering) if len(nodes) == 1 else not set(nodes).isdisjoint(answering)


def choose(
    slots: Iterable[HeldSlot], homes: Homes, *, floor: int, saved: Place | None, racks: Mapping[str, str]
) -> MemorySource | None:
    """The furthest state, then the nearest copy of each of its parts; None if the store's is as good.

    Slots of generations below `floor` count no more. `saved` is the place of the newest checkpoint that counts: only what has
    gone on since, in its generation or a later one, is better.
    """
    usable = [slot for slot in slots if slot.place[0] >= floor and _is_further(slot.place, saved)]
    had = ({slot.place for slot in usable if slot.part == part} for part in homes)
    place = max(set.intersection(*had), default=None)
    if place is None:
        return None
    best = {part: [slot for slot in usable if (slot.place, slot.part) == (place, part)] for part in homes}
    holders = {part: {slot.node for slot in found} for part, found in best.items()}
    on = dict.fromkeys(node for part, nodes in homes.items() for node in nodes if node in holders[part])
    lacking = [part for part, nodes in homes.items() if holders[part].isdisjoint(nodes)]
    return MemorySource(
        place=place,
        num_bytes=sum(found[0].num_bytes for found in best.values()),
        on=tuple(on),
        fetches=tuple(_fetch(part, homes[part][0], holders[part], racks) for part in lacking),
    )


def _fetch(part: str, to: str, holders: Collection[str], racks: Mapping[str, str]) -> Fetch:
    return Fetch(part=part, to=to, holders=tuple(sorted(holders, key=lambda node: (_is_far(node, to, racks), node))))


def _is_further(place: Place, saved: Place | None) -> bool:
    return saved is None or (place[0] >= saved[0] and place[1] > saved[1])


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
