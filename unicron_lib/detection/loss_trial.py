"""The loss guard on trial: simulated curves with what real ones have, and with harm done to them. Pure and seeded.

A curve falls by a power law; its noise is correlated and has heavy tails, single batches are unusual, the text changes now and
then, and half of the curves have a spike that passes by itself, as BLOOM's did.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from unicron_lib.detection.loss_guard import LossGuard, Point, RollBack, Spiking

ITERATIONS = 1000
PATIENCE_ITERS = 50
ODD_BATCH = 0.003
"""Share of the batches that are unusual: a loss up to 40% higher, a norm up to 8 times the usual."""
NEW_TEXT = 0.1
"""Largest lasting change of the loss when the text changes, as a share of it."""
SPIKE_LASTS = 12.0
"""Iterations in which a spike that passes falls to a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the guard made of the curves, in numbers of curves; each harmed one diverged for good at one iteration.

    `false_rollbacks` on unharmed curves; `false_spikes` were told of curves that had none. `slowest` and `worst_aim` are the
    longest way from the harm to the roll-back, and the farthest that it went back beside it, in iterations.
    """

    curves: int
    spikes: int
    false_rollbacks: int
    false_spikes: int
    spikes_told: int
    harmed: int
    rolled_back: int
    slowest: int
    worst_aim: int


class Curve:
    """One simulated job; `spike_at` and `harm_at` are the iterations at which its norm leaves its range, -1 for never."""

    def __init__(self, seed: int, *, harmed: bool) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation guards nothing
        pick = self._random
        self._floor, self._height = pick.uniform(1.2, 3.0), pick.uniform(2.0, 8.0)
        self._exponent, self._sigma = pick.uniform(0.25, 0.6), pick.uniform(0.004, 0.03)
        self._norm, self._norm_sigma = pick.uniform(0.1, 2.0), pick.uniform(0.05, 0.25)
        self._text_at, self._text = pick.randrange(100, ITERATIONS), pick.uniform(-NEW_TEXT, NEW_TEXT)
        spiked = harmed or pick.random() < 0.5
        at = pick.randrange(120, ITERATIONS - 150)
        self.harm_at, self.spike_at = (at, -1) if harmed else (-1, at if spiked else -1)
        self._rise = pick.uniform(0.5, 1.5)

    def points(self) -> Iterator[Point]:
        """Its iterations, in order."""
        pick, wander = self._random, 0.0
        for iteration in range(ITERATIONS):
            tail = pick.gauss(0.0, 1.0) / math.sqrt(max(pick.gammavariate(2.5, 1 / 2.5), 1e-3))
            wander = 0.5 * wander + self._sigma * tail
            loss = (self._floor + self._height * (iteration + 2.0) ** -self._exponent) * math.exp(wander)
            norm = self._norm * (1.0 + 8.0 / (iteration + 1.0)) * math.exp(pick.gauss(0.0, self._norm_sigma))
            if iteration >= self._text_at:
                loss *= 1.0 + self._text
            if pick.random() < ODD_BATCH:
                loss, norm = loss * pick.uniform(1.0, 1.4), norm * pick.uniform(1.0, 8.0)
            loss, norm = self._harm(iteration, loss, norm)
            yield Point(iteration=iteration, loss=loss, grad_norm=norm)

    def _harm(self, iteration: int, loss: float, norm: float) -> tuple[float, float]:
        """The norm leads by 3 iterations."""
        begun = max(self.harm_at, self.spike_at)
        since = iteration - begun
        if begun < 0 or since < 0:
            return loss, norm
        left = 1.0 if self.harm_at >= 0 else math.exp(-max(0, since - 5) / SPIKE_LASTS)
        rise = self._rise * min(1.0, max(0, since - 3) / 3.0)
        return loss * (1.0 + rise * left), norm * (1.0 + 200.0 * left * self._random.uniform(0.1, 1.0))


def judge_curves(num_curves: int, *, seed: int = 0) -> Outcome:
    """Follow `num_curves` unharmed and as many harmed curves."""
    calm = [Curve(seed * 1_000_003 + number, harmed=False) for number in range(num_curves)]
    harmed = [Curve(-1 - seed * 1_000_003 - number, harmed=True) for number in range(num_curves)]
    told = [_verdicts(curve) for curve in calm]
    found = [next((v for v in _verdicts(curve) if isinstance(v, RollBack)), None) for curve in harmed]
    backs = [(verdict, curve.harm_at) for verdict, curve in zip(found, harmed, strict=True) if verdict]
    right = [(verdict, at) for verdict, at in backs if verdict.iteration > at]
    spiking = [any(isinstance(v, Spiking) for v in verdicts) for verdicts in told]
    return Outcome(
        curves=num_curves,
        spikes=sum(curve.spike_at >= 0 for curve in calm),
        false_rollbacks=sum(any(isinstance(v, RollBack) for v in verdicts) for verdicts in told) + len(backs) - len(right),
        false_spikes=sum(was for was, curve in zip(spiking, calm, strict=True) if curve.spike_at < 0),
        spikes_told=sum(was for was, curve in zip(spiking, calm, strict=True) if curve.spike_at >= 0),
        harmed=num_curves,
        rolled_back=len(right),
        slowest=max((verdict.iteration - at for verdict, at in right), default=0),
        worst_aim=max((abs(verdict.first - at) for verdict, at in right), default=0),
    )


def _verdicts(curve: Curve) -> tuple[object, ...]:
    return LossGuard(patience_iters=PATIENCE_ITERS).look(1, curve.points())
