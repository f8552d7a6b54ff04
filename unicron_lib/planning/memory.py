"""States in the host memory of nodes: who keeps a second copy, and which one a generation begins from. Pure."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_lib.domain.jobs import JobState
from unicron_lib.planning.holding import MOST_IN_VAIN

Place = tuple[int, int]
"""Generation and iteration of a state."""
MOST_PEERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A whole state of a job in the memory of `node`."""

    node: str
    place: Place
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource:
    """What a generation begins from: its nodes `on` have it; if none has, `to` copies it from the first of `holders`."""

    place: Place
    num_bytes: int
    on: tuple[str, ...]
    to: str = ""
    holders: tuple[str, ...] = ()


def may_begin_from_memory(job: JobState) -> bool:
    """Whether slots are worth asking for: of a training that went on before, and has not failed again and again with them."""
    is_kept = job.spec.memory_interval != 0 and not job.spec.command
    return is_kept and job.restored and job.rolled_back_to is None and job.stuck_restarts < MOST_IN_VAIN


def is_kept(job: JobState, nodes: Collection[str], answering: Collection[str]) -> bool:
    """Whether a state of the job, which was on `nodes`, is in the memory of one of those that answer.

    Ranks keep their own node's slots; of a job on one node another one has a copy. Cut replicas keep none.
    """
    if not nodes or job.spec.replica_gpus > 1 or not may_begin_from_memory(job):
        return False
    return bool(answering) if len(nodes) == 1 else not set(nodes).isdisjoint(answering)


def choose(
    slots: Iterable[HeldSlot], nodes: Sequence[str], *, floor: int, saved: Place | None, racks: Mapping[str, str]
) -> MemorySource | None:
    """The furthest state, then the nearest copy of it, for a generation on `nodes`; None if the store's is as good.

    Slots of generations below `floor` count no more. `saved` is the place of the newest checkpoint that counts: only what has
    gone on since, in its generation or a later one, is better.
    """
    usable = [slot for slot in slots if slot.place[0] >= floor and _is_further(slot.place, saved)]
    if not usable:
        return None
    place = max(slot.place for slot in usable)
    best = [slot for slot in usable if slot.place == place]
    on = tuple(node for node in nodes if any(slot.node == node for slot in best))
    if on:
        return MemorySource(place=place, num_bytes=best[0].num_bytes, on=on)
    near = sorted({slot.node for slot in best}, key=lambda node: (_is_far(node, nodes[0], racks), node))
    return MemorySource(place=place, num_bytes=best[0].num_bytes, on=(), to=nodes[0], holders=tuple(near))


def _is_further(place: Place, saved: Place | None) -> bool:
    return saved is None or (place[0] >= saved[0] and place[1] > saved[1])


def _is_far(node: str, other: str, racks: Mapping[str, str]) -> bool:
    rack = racks.get(node, "")
    return not rack or rack != racks.get(other, "")


def peers_of(job: str, nodes: Collection[str], others: Collection[str], racks: Mapping[str, str]) -> tuple[str, ...]:
    """Who may keep a copy for a job on `nodes`, the best first, of `others`; nobody if the job has several nodes itself.

    Another rack is better: one switch, or one power supply, takes a rack. Jobs on one node choose different peers.
    """
    if len(nodes) != 1:
        return ()
    (home,) = nodes
    candidates = (node for node in others if node != home)
    ranked = sorted(candidates, key=lambda node: (_shares_rack(node, home, racks), _draw(job, node)))
    return tuple(ranked[:MOST_PEERS])


def _shares_rack(node: str, home: str, racks: Mapping[str, str]) -> bool:
    return bool(racks.get(home)) and racks.get(node) == racks.get(home)


def _draw(job: str, node: str) -> bytes:
    return hashlib.sha256(f"{job}\0{node}".encode()).digest()
