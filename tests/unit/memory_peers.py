"""Ranks of a generation that are threads of one process, and die, or are cut off, at any of their calls."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from stage import Stage

from unicron_lib.training.peers import CollectiveFailed


class Killed(BaseException):
    """The process of a rank is gone."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a rank at its `at`-th point (from 0): a call of its peers, or another one that the test chooses.

    `kill`: it is gone. `cut`: all connections of all ranks are, as when the agent has them park. `park`: all are told to stop
    at an iteration's end. A fault comes `before` the call, so that nobody gets anything of it; `after` it; or `amid` it: then
    the rank has given its part, and only the `lucky` ranks get the result. Ranks beyond the last one are counted from 0 again.
    """

    rank: int
    at: int
    kind: Literal["kill", "cut", "park"] = "kill"
    moment: Literal["before", "amid", "after"] = "before"
    lucky: frozenset[int] = frozenset()


@dataclass
class _Meeting:
    kind: str
    parts: dict[int, Any] = field(default_factory=dict)
    unlucky: frozenset[int] = frozenset()
    takers: set[int] = field(default_factory=set)


class Room:
    """Where the ranks of one generation meet. Who leaves, by death or not, fails all that wait for it."""

    def __init__(self, stage: Stage, size: int, faults: tuple[Fault, ...] = ()) -> None:
        self.stage, self.size = stage, size
        self.faults = {(fault.rank % size, fault.at): replace(fault, rank=fault.rank % size) for fault in faults}
        self.fired: list[Fault] = []
        self.on_park: Callable[[], None] = lambda: None
        self.gone: set[int] = set()
        self.is_cut = False
        self.meetings: dict[object, _Meeting] = {}
        self._points = [0] * size
        self._made: dict[tuple[int, tuple[int, ...]], MemoryPeers] = {}

    def peers(self, rank: int, members: tuple[int, ...] = ()) -> "MemoryPeers":
        """A rank's view of all, or of the `members` alone, among which it has the number of its place."""
        place = rank, members or tuple(range(self.size))
        return self._made.setdefault(place, MemoryPeers(self, *place))

    def leave(self, rank: int) -> None:
        self.gone.add(rank)

    def pause(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Let others run. What is random is each rank's own, as if it were a process."""
        own = torch.get_rng_state()
        self.stage.pause(rank, until)
        torch.set_rng_state(own)

    def pass_point(self, rank: int) -> Fault | None:
        """Let others run; what has been ordered for this point. A fault that comes before it happens here."""
        self.pause(rank)
        at, self._points[rank] = self._points[rank], self._points[rank] + 1
        fault = self.faults.get((rank, at))
        if fault and fault.moment == "before":
            self.strike(fault)
        return fault

    def strike(self, fault: Fault) -> None:
        self.fired.append(fault)
        if fault.kind == "park":
            self.on_park()
        elif fault.kind == "cut":
            self.is_cut = True
        else:
            self.leave(fault.rank)
            raise Killed


class MemoryPeers:
    """One rank's view of a room, or of some members of it."""

    def __init__(self, room: Room, rank: int, members: tuple[int, ...]) -> None:
        self._room, self._rank, self._members = room, rank, members
        self.rank, self.size = members.index(rank), len(members)
        self._calls: dict[object, int] = {}

    def sum(self, tensor: torch.Tensor) -> None:
        def take(parts: dict[int, Any]) -> None:
            tensor.zero_()
            for rank in self._members:
                tensor.add_(parts[rank])

        self._meet("sum", "all", self._members, tensor.clone(), take, spoil=lambda: tensor.fill_(float("nan")))

    def exchange(self, mine: bytes) -> list[bytes]:
        told: list[bytes] = []
        self._meet("exchange", "all", self._members, mine, lambda parts: told.extend(parts[r] for r in self._members))
        return told

    def send(self, tensor: torch.Tensor, to: int) -> None:
        pair = (self._rank, self._members[to])
        self._meet("pair", pair, pair, tensor.clone(), lambda _: None)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        pair = (self._members[source], self._rank)
        self._meet("pair", pair, pair, None, lambda parts: fill(tensor, parts[pair[0]]), spoil=tensor.zero_)

    def swap(self, give: torch.Tensor, take: torch.Tensor, other: int) -> None:
        pair = tuple(sorted((self._rank, self._members[other])))
        giver = self._members[other]
        self._meet("swap", ("swap", pair), pair, give.clone(), lambda parts: fill(take, parts[giver]), spoil=take.zero_)

    def _meet(self, kind, place, members, mine, take, spoil=lambda: None) -> None:
        room, rank, place = self._room, self._rank, (self._members, place)
        number = self._calls[place] = self._calls.get(place, -1) + 1
        try:
            fault = room.pass_point(rank)
            meeting = room.meetings.setdefault((place, number), _Meeting(kind))
            assert meeting.kind == kind, f"rank {rank} calls {kind} while others call {meeting.kind}"
            self._check_connected(meeting, members)
            meeting.parts[rank] = mine
            is_amid = fault is not None and fault.moment == "amid"
            if is_amid:
                meeting.unlucky = frozenset(members) - fault.lucky
            room.pause(rank, lambda: self._is_over(meeting, members))
            if is_amid:
                room.strike(fault)
            self._check_connected(meeting, members)
        except CollectiveFailed:
            spoil()
            raise
        take(meeting.parts)
        meeting.takers.add(rank)
        if meeting.takers >= set(members):
            del room.meetings[place, number]
        if fault and fault.moment == "after":
            room.strike(fault)

    def _is_over(self, meeting: _Meeting, members) -> bool:
        return set(meeting.parts) >= set(members) or self._is_lost(meeting, members)

    def _is_lost(self, meeting: _Meeting, members) -> bool:
        """Whoever has given its part may go: the others have it."""
        missing = set(members) - set(meeting.parts)
        return bool(self._room.is_cut or self._room.gone & missing) if missing else self._rank in meeting.unlucky

    def _check_connected(self, meeting: _Meeting, members) -> None:
        if self._is_lost(meeting, members):
            raise CollectiveFailed("RuntimeError", "Connection closed by peer")


@torch.no_grad()
def fill(tensor: torch.Tensor, arrived: torch.Tensor) -> None:
    assert (tensor.shape, tensor.dtype) == (arrived.shape, arrived.dtype)
    tensor.copy_(arrived)
