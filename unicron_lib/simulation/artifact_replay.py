"""How the artifact of Oobleck (SOSP'23) replays a trace of lost nodes: what its models of three systems have in common.

All times are whole milliseconds. Nodes start, meet, and iterate; one after the other is lost. The rules are the artifact's,
the code is ours. Three oddities of it move its averages and are kept: among nodes that start at the same time the order is
that of `heapq`; an iteration under way goes on until the next meeting is over; a meeting that is over before another one
that was called later leaves nobody to that one, and the system stands still until a node is lost.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

READY_MS = 45_000
"""What a new node takes."""
STAGES = 12
"""Of a pipeline: with fewer nodes nothing runs."""


class Kind(IntEnum):
    """What happens, in the order of things that happen at once."""

    ADDED = 1
    LOST = 2
    READY = 4
    MET = 5
    REBALANCED = 6
    ITERATED = 7
    SAVED = 8


class Phase(StrEnum):
    """What the nodes do."""

    STOPPED = "stopped"
    MEETING = "meeting"
    RUNNING = "running"


@dataclass(order=True, slots=True)
class Happening:
    """`what` is the node, or the configuration in which an iteration was begun."""

    at_ms: int
    kind: Kind
    what: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`throughput` in samples a second for the most nodes down to the fewest; `meet_ms` is what the first meeting takes."""

    samples: int
    throughput: tuple[float, ...]
    meet_ms: int


@dataclass(eq=False)
class Replay:
    """A system on a trace of `losses`, each a time and a node. A subclass says what a loss and an iteration lead to."""

    model: Model
    losses: Sequence[tuple[int, int]]
    most_nodes: int
    heap: list[Happening] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    meeting: list[int] = field(default_factory=list)
    phase: Phase = Phase.STOPPED
    num_pipelines: int = 0
    configuration: int = 0
    iteration_ms: int = 0
    done: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    begun_ms: int | None = None
    ended_ms: int = 0

    def __post_init__(self) -> None:
        self.takes_ms = {Kind.MET: self.model.meet_ms}

    def average(self) -> float:
        """Samples a second that are kept, from the first iteration to the last one before the last loss, which ends it."""
        for node in range(1, self.most_nodes + 1):
            self.push(0, Kind.ADDED, node)
        for at_ms, node in self.losses:
            self.push(at_ms, Kind.LOST, node)
        heapq.heapify(self.heap)  # the artifact does it once more, which changes the order of equals
        while self.heap and self.heap[0].at_ms < self.losses[-1][0]:
            self._happen(heapq.heappop(self.heap))
        kept = sum((end - begin) * rate for (begin, end), rate in zip(self.spans, self.rates, strict=False))
        return kept / (self.spans[-1][1] - (self.begun_ms or 0)) if self.spans else 0.0

    def push(self, at_ms: int, kind: Kind, what: int = 0) -> None:
        """Let something happen later."""
        heapq.heappush(self.heap, Happening(at_ms, kind, what))

    # --- what the systems differ in

    def lose(self, at_ms: int, node: int) -> None:
        """A node is lost: all meet again."""
        del self.places[node]
        self.meet(at_ms)

    def follow(self, at_ms: int) -> None:
        """An iteration is done: on to the next."""
        self.iterate(at_ms)

    # --- what they have in common

    def meet(self, at_ms: int, kind: Kind = Kind.MET) -> None:
        """Those who are there begin to meet."""
        self.phase = Phase.MEETING
        self._gather(at_ms, kind)

    def iterate(self, at_ms: int) -> None:
        """Begin an iteration."""
        self.push(at_ms + self.iteration_ms, Kind.ITERATED, self.configuration)

    def _gather(self, at_ms: int, kind: Kind) -> None:
        self.meeting = list(self.places)
        self.push(at_ms + self.takes_ms[kind], kind)

    def _happen(self, it: Happening) -> None:
        match it.kind:
            case Kind.ADDED:
                self.added.append(it.what)
                self.push(it.at_ms + READY_MS, Kind.READY, it.what)
            case Kind.READY:
                self._ready(it.at_ms, it.what)
            case Kind.LOST:
                self.lose(it.at_ms, it.what)
            case Kind.MET | Kind.REBALANCED:
                self._met(it.at_ms, it.kind)
            case Kind.ITERATED if it.what == self.configuration:
                self.iterated(it.at_ms)
            case _:
                pass

    def _ready(self, at_ms: int, node: int) -> None:
        self.places = {it: self.places.get(it, []) for it in self.added if it in self.places or it == node}
        if self.phase is Phase.STOPPED:
            self.phase, self.meeting = Phase.MEETING, [node]
            self.push(at_ms + self.takes_ms[Kind.MET], Kind.MET)
        elif self.phase is Phase.MEETING:
            self.meeting.append(node)

    def _met(self, at_ms: int, kind: Kind) -> None:
        if all(node in self.places for node in self.meeting):
            self.settle(at_ms)
        else:
            self._gather(at_ms, kind)

    def settle(self, at_ms: int) -> None:
        """Whoever has met gets a place in a pipeline, if there is one, and a new configuration begins."""
        self.num_pipelines = len(self.meeting) // STAGES
        places = [(pipeline, stage) for pipeline in range(self.num_pipelines) for stage in range(STAGES)]
        for number, node in enumerate(self.meeting):
            self.places[node] = places[number : number + 1]
        self.configuration, self.meeting = self.configuration + 1, []
        if not self.num_pipelines:
            self.phase = Phase.STOPPED
            return
        self.phase = Phase.RUNNING
        throughput = self.model.throughput[self.most_nodes - len(self.places)]
        self.iteration_ms = int(self.model.samples / throughput * 1000)
        self.iterate(at_ms)
        if self.begun_ms is None:
            self.begun_ms = self.ended_ms = at_ms

    def iterated(self, at_ms: int) -> None:
        """An iteration of the present configuration is over."""
        self.done += 1
        self.spans.append((self.ended_ms, at_ms))
        self.rates.append(1000 * self.model.samples / (at_ms - self.ended_ms))
        self.ended_ms = at_ms
        self.follow(at_ms)
