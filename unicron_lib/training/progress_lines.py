"""The lines in which a rank tells its progress, made from a template: each iteration's comes from the thread that trains.

A message object and its serialization cost that thread three times as much.
"""

import json
import time
from math import isfinite

from unicron_lib.training.environment import RankEnvironment

_VARYING = ("iteration", "loss", "iteration_s", "flops", "at", "compute_s", "grad_norm")


class ProgressLines:
    """Those of a rank in one generation, messages of the type Progress; `origin` are its fields on how it came to be there."""

    def __init__(self, env: RankEnvironment, **origin: str | float) -> None:
        self._fixed = {
            "type": "progress",
            "job": env.job,
            "generation": env.generation,
            "rank": env.rank,
            "world_size": env.world_size,
            **origin,
        }
        fixed = json.dumps(self._fixed).removesuffix("}").replace("%", "%%")
        self._template = (fixed + "".join(f', "{name}": %r' for name in _VARYING) + "}\n").encode()

    def line(
        self, iteration: int, *, loss: float, iteration_s: float, flops: float, compute_s: float = 0.0, grad_norm: float = 0.0
    ) -> bytes:
        """That of an iteration which ends now."""
        values = (iteration, loss, iteration_s, flops, time.time(), compute_s, grad_norm)
        if isfinite(loss + flops + grad_norm):
            return self._template % values
        return json.dumps(self._fixed | dict(zip(_VARYING, values, strict=True))).encode() + b"\n"
