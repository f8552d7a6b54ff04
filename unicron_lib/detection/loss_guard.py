"""Is the loss still what it was? NaN at once; a spike of loss and gradient norm when it does not pass by itself. Pure.

A spike is told by both: batches of unusual text raise the loss alone, and a norm that is large for a moment is clipped. The
norm leads, by 3 to 4 iterations in BLOOM's spike (2.20 -> 5.10, norm 0.24 -> 960), so that what did it is where the norm left
its range. That spike was over after 30 iterations, and going back would have cost more: hence the patience.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import ClassVar, assert_never

from unicron_lib.domain.events import Event, FailureDetected, LossSpiked
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure

BASELINE = 64
"""Undisturbed iterations that tell what is usual."""
ENOUGH = 32
SIGMAS = 8.0
RISE = 0.2
"""A loss this much of the usual one above it is high, if it is as many sigmas above it as well."""
NORM_FACTOR = 3.0
"""A norm that is so many times the usual one is high."""
LEAD = 8
"""Iterations over which norm and loss are seen together."""
REFRESH = 8
"""Iterations after which it is told anew what is usual."""
SUSTAINED = 3
"""High losses within them that make a spike: one batch is not one."""
CALM = 5
"""Losses in a row that are not high any more end it."""
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Loss and gradient norm (before clipping; 0: not measured) of one iteration of a job."""

    __pydantic_config__: ClassVar = {"ser_json_inf_nan": "constants"}

    iteration: int
    loss: float
    grad_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spiking:
    """The loss is high since about iteration `first`; it may pass."""

    first: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The spike that began with iteration `first` is over, as `iteration` shows."""

    first: int
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """It does not pass: go back to before iteration `first`, and leave out what `first` to `last` consumed.

    `iteration` is the newest one that was seen.
    """

    first: int
    last: int
    iteration: int
    reason: str


Verdict = Spiking | Recovered | RollBack


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usual:
    loss: float
    spread: float
    norm: float

    def is_high(self, loss: float) -> bool:
        return loss - self.loss > max(SIGMAS * self.spread, RISE * abs(self.loss))

    def is_norm_high(self, norm: float) -> bool:
        return norm > NORM_FACTOR * self.norm


@dataclass(slots=True, kw_only=True)
class _Spike:
    first: int
    last: int
    seen: int
    peak: float
    usual: _Usual
    calm: int = 0


class LossGuard:
    """Follows the curve of one job, from generation to generation."""

    def __init__(self, *, patience_iters: int) -> None:
        self._patience = patience_iters
        self._generation = -1
        self._given_up = -1
        self._seen = -1
        self._calm: deque[Point] = deque(maxlen=BASELINE)
        self._usual: _Usual | None = None
        self._newest: deque[tuple[Point, _Usual]] = deque(maxlen=LEAD)
        self._spike: _Spike | None = None

    def look(self, generation: int, curve: Iterable[Point]) -> tuple[Verdict, ...]:
        """What is new with the iterations of `curve`, in order, that were not seen yet in this generation."""
        if generation < self._generation:
            return ()
        points = list(curve)
        if generation > self._generation and points:
            self._generation = generation
            self._go_back(points[0].iteration)
        return tuple(verdict for point in points for verdict in self._follow(point))

    def _go_back(self, iteration: int) -> None:
        """A new generation repeats iterations from `iteration` on: what was seen of them was another course."""
        self._seen = iteration - 1
        self._calm = deque((p for p in self._calm if p.iteration < iteration), maxlen=BASELINE)
        self._newest.clear()
        self._usual = None
        if self._spike and iteration <= self._spike.first:
            self._spike = None

    def _follow(self, point: Point) -> Iterator[Verdict]:
        if point.iteration <= self._seen or self._given_up == self._generation:
            return
        self._seen = point.iteration
        if not (isfinite(point.loss) and isfinite(point.grad_norm)):
            yield self._not_a_number(point)
        elif self._spike:
            yield from self._wait(self._spike, point)
        else:
            yield from self._watch(point)

    def _not_a_number(self, point: Point) -> RollBack:
        self._given_up = self._generation
        it, reason = point.iteration, f"the loss is {point.loss} and the gradient's norm {point.grad_norm}"
        return RollBack(first=it, last=it, iteration=it, reason=f"{reason} in iteration {it}")

    def _watch(self, point: Point) -> Iterator[Spiking]:
        usual = self._usual
        if usual is None:
            self._take(point)
            return
        self._newest.append((point, usual))
        high = [seen for seen, then in self._newest if then.is_high(seen.loss)]
        large = [seen for seen, then in self._newest if then.is_norm_high(seen.grad_norm)]
        if not usual.is_high(point.loss):
            self._take(point)
        if len(high) < SUSTAINED or not (large or self._is_norm_unknown()):
            return
        first = min(seen.iteration for seen in (*large, *high))
        peak = max(high, key=lambda seen: seen.loss)
        self._spike = _Spike(first=first, last=max(first, peak.iteration), seen=point.iteration, peak=peak.loss, usual=usual)
        self._newest.clear()
        norm = f", and its gradient's norm {usual.norm:.3g} to {max(seen.grad_norm for seen in large):.3g}" if large else ""
        yield Spiking(
            first=first, reason=f"the loss went from {usual.loss:.3f} to {peak.loss:.3f}{norm}, from iteration {first} on"
        )

    def _wait(self, spike: _Spike, point: Point) -> Iterator[Recovered | RollBack]:
        if point.loss > spike.peak and point.iteration <= spike.seen + LEAD:
            spike.last, spike.peak = point.iteration, point.loss
        spike.calm = 0 if spike.usual.is_high(point.loss) else spike.calm + 1
        took = point.iteration - spike.first
        told = f"the loss went from {spike.usual.loss:.3f} to {spike.peak:.3f}"
        if spike.calm >= CALM:
            self._spike = None
            reason = f"{told} and came back to {point.loss:.3f} within {took} iterations, by itself"
            yield Recovered(first=spike.first, iteration=point.iteration, reason=reason)
        elif took >= self._patience:
            self._given_up = self._generation  # nothing more is said of it: it is to be replaced
            reason = (
                f"{told} from iteration {spike.first} on, and is {point.loss:.3f} after {took} iterations: it does not pass"
            )
            yield RollBack(first=spike.first, last=spike.last, iteration=point.iteration, reason=reason)

    def _is_norm_unknown(self) -> bool:
        return all(seen.grad_norm == 0.0 for seen, _ in self._newest)

    def _take(self, point: Point) -> None:
        """One more that is as usual."""
        self._calm.append(point)
        if len(self._calm) < ENOUGH or (self._usual and point.iteration % REFRESH):
            return
        losses = [calm.loss for calm in self._calm]
        middle = median(losses)
        spread = MAD_TO_SIGMA * median(abs(loss - middle) for loss in losses)
        self._usual = _Usual(loss=middle, spread=spread, norm=median(calm.grad_norm for calm in self._calm))


def loss_events(verdicts: Iterable[Verdict], *, job: str, generation: int, now: float) -> Iterator[Event]:
    """The journal's events for what the guard found; the same whoever finds it."""
    for verdict in verdicts:
        same = f"{job}/{generation}/{verdict.first}"
        match verdict:
            case Spiking(first=first, reason=reason):
                yield LossSpiked(id=f"spiked/{same}", at=now, job=job, generation=generation, iteration=first, reason=reason)
            case Recovered(iteration=end, reason=reason):
                settled = f"settled/{same}"
                yield LossSpiked(id=settled, at=now, job=job, generation=generation, iteration=end, reason=reason, over=True)
            case RollBack() as found:
                failure = Failure(
                    id=f"loss/{same}",
                    kind=ErrorKind.LOSS_ANOMALY,
                    method=DetectionMethod.STATISTICS,
                    seen_at=now,
                    job=job,
                    generation=generation,
                    iteration=found.iteration,
                    evidence=found.reason,
                    spoiled=(found.first, found.last),
                )
                yield FailureDetected(id=failure.id, at=now, failure=failure)
            case _:
                assert_never(verdict)
