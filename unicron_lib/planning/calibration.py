"""Measurements correct a modelled profile: one monotone scaling of the model through the measured points.

What the model has right is the shape: which sizes suit the model and its batch. What it has wrong, measurements know: how
fast the machines really are. So the scaling keeps the model's order of sizes, and a measured size keeps its measurement.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Size = TypeVar("Size")
"""A number of GPUs, or a layout on so many."""
LARGEST = 709.0
"""The logarithm of about the largest float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A monotone function from modelled to real FLOP/s: `knots` are pairs of logarithms, both ascending.

    Between two knots the real FLOP/s follow a power of the modelled ones, outside they are in proportion.
    """

    knots: tuple[tuple[float, float], ...] = ()

    def __call__(self, flops: float) -> float:
        """Real FLOP/s for modelled ones; unchanged if nothing was ever measured."""
        if not self.knots or flops <= 0:
            return flops
        at = math.log(flops)
        right = bisect_right(self.knots, at, key=lambda knot: knot[0])
        if right in {0, len(self.knots)}:
            x, y = self.knots[min(right, len(self.knots) - 1)]
            return math.exp(min(LARGEST, y + at - x))
        (x0, y0), (x1, y1) = self.knots[right - 1 : right + 1]
        return math.exp(y0 + (at - x0) * (y1 - y0) / (x1 - x0))


def calibrated(modelled: Callable[[Size], float], measured: Mapping[Size, float]) -> Scaling:
    """The scaling of `modelled` (GPUs, or layouts, to FLOP/s) through the `measured` points.

    Sizes that were measured or modelled at 0 are left out. Where the measurements contradict the model's order of sizes,
    neighbours share their geometric mean (pool adjacent violators): the nearest monotone scaling in the logarithm.
    """
    pairs = [(modelled(size), flops) for size, flops in measured.items()]
    logs = sorted((math.log(model), math.log(flops)) for model, flops in pairs if model > 0 and flops > 0)
    blocks: list[list[tuple[float, float]]] = []
    for point in logs:
        blocks.append([point])
        while len(blocks) > 1 and (_mean(blocks[-2]) >= _mean(blocks[-1]) or blocks[-2][-1][0] == blocks[-1][0][0]):
            last = blocks.pop()
            blocks[-1] = [*blocks[-1], *last]
    return Scaling(knots=tuple(knot for block in blocks for knot in _ends(block)))


def _mean(block: list[tuple[float, float]]) -> float:
    return math.fsum(y for _, y in block) / len(block)


def _ends(block: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The block is flat: its first and its last point say all."""
    level = _mean(block)
    first, last = block[0][0], block[-1][0]
    return [(first, level)] if first == last else [(first, level), (last, level)]
