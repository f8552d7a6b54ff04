"""Oobleck, Varuna and Bamboo as Oobleck's artifact models them; the tables of throughput are measurements that it quotes."""

from dataclasses import dataclass

from unicron_lib.simulation.artifact_replay import STAGES, Kind, Model, Phase, Replay

SAVED_EVERY = 10
"""Iterations between two of Varuna's checkpoints."""
SLOWER = 1.5
"""What a loss makes of Bamboo's iterations until the pipelines are balanced anew."""
RISK = 0.05
"""Bamboo balances anew if this share of its nodes could not be lost without a restart."""


@dataclass(eq=False)
class Oobleck(Replay):
    """After each loss all meet; nothing is lost but the iterations that come to nothing in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarunaModel(Model):
    """A restart, `restart_ms` for the most nodes down to the fewest, overlaps with a checkpoint of `checkpoint_ms`."""

    restart_ms: tuple[int, ...]
    checkpoint_ms: int


@dataclass(eq=False)
class Varuna(Replay):
    """After each loss the last checkpoint is loaded, and the first iteration after it is followed by one.

    Two more oddities are the artifact's: whether a checkpoint counts hangs on the places in its heap, and if it does not,
    ten iterations are struck out even where there have not been as many, so that those of later are counted in their place.
    """

    model: VarunaModel
    saved_ms: int | None = None
    is_restarted: bool = False

    def settle(self, at_ms: int) -> None:
        """The next restart takes what it takes with the nodes of now."""
        self.takes_ms[Kind.MET] = self.model.restart_ms[self.most_nodes - len(self.places)] - self.model.checkpoint_ms
        super().settle(at_ms)

    def lose(self, at_ms: int, node: int) -> None:
        """What is not saved is lost."""
        self.is_restarted = True
        first = 0 if self.saved_ms is None else self._first_unsaved()
        self.rates[first:] = [0.0] * len(self.rates[first:])
        super().lose(at_ms, node)

    def _first_unsaved(self) -> int:
        known = min(len(self.spans), len(self.rates))
        begins = (number for number, (begin, _) in enumerate(self.spans[:known]) if begin == self.saved_ms)
        return next(begins, known)

    def follow(self, at_ms: int) -> None:
        """Save after a restart, and now and then."""
        if self.is_restarted or self.done % SAVED_EVERY == 0:
            self.is_restarted = False
            at_ms += self.model.checkpoint_ms
            self.push(at_ms + self.model.checkpoint_ms, Kind.SAVED)
            if self._fails():
                self.done = max(0, self.done - SAVED_EVERY)
                self.rates[-SAVED_EVERY:] = [0.0] * SAVED_EVERY
            else:
                self.saved_ms = at_ms
            self.ended_ms = at_ms
        self.iterate(at_ms)

    def _fails(self) -> bool:
        return next(it.kind for it in self.heap if it.kind in {Kind.LOST, Kind.SAVED}) is Kind.LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class BambooModel(Model):
    """`balance_ms` is what it takes to balance the pipelines anew."""

    balance_ms: int


@dataclass(eq=False)
class Bamboo(Replay):
    """The node before a lost one does its work too, slower, until the pipelines are balanced anew.

    One more oddity is the artifact's: also the loss of a spare makes the iterations slower, until the next meeting.
    """

    model: BambooModel
    fallback: tuple[int, int] | None = None
    is_extended: bool = False
    spares: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.takes_ms[Kind.REBALANCED] = self.model.balance_ms

    def lose(self, at_ms: int, node: int) -> None:
        """Fatal only if the node, or the one that would do its work, does another's work already."""
        places = self.places.pop(node)
        if places:
            pipeline, stage = places[0]
            before = (pipeline, (stage - 1) % STAGES)
            others = next((it for it in self.places.values() if before in it), None)
            if len(places) > 1 or (others and len(others) > 1):
                self.meet(at_ms)
                return
            if others:
                others.append(places[0])
        if self.phase is Phase.RUNNING and self.fallback is None:
            self.fallback, self.is_extended = (self.done, at_ms), False
            self.iteration_ms = int(self.iteration_ms * SLOWER)

    def settle(self, at_ms: int) -> None:
        """Whom there is no place for is a spare."""
        self.fallback, there = None, len(self.meeting)
        super().settle(at_ms)
        self.spares = there - self.num_pipelines * STAGES

    def iterated(self, at_ms: int) -> None:
        """The iteration in which the loss fell takes longer from there on."""
        if self.fallback and not self.is_extended and self.fallback[0] == self.done:
            self.is_extended = True
            self.push(at_ms + int((at_ms - self.fallback[1]) * (SLOWER - 1)), Kind.ITERATED, self.configuration)
            return
        super().iterated(at_ms)

    def follow(self, at_ms: int) -> None:
        """Balance anew where it helps."""
        double = sum(len(places) > 1 for places in self.places.values())
        single = self.num_pipelines * STAGES - double
        is_risky = double and (self.spares >= double or 2 * double / single > RISK)
        if is_risky or (single + self.spares) // STAGES > self.num_pipelines:
            self.meet(at_ms, Kind.REBALANCED)
        else:
            self.iterate(at_ms)
