"""How a rank tells its progress, iteration by iteration, in the thread that trains.

The lines come from a template: a message object and its serialization cost three times as much. They are left in memory, where
the agent looks soon: to wake it costs more than all the rest, and is done for iterations of some length only.
"""

import json
import time
from collections.abc import Callable
from math import isfinite

from unicron_lib.agent.left_lines import LineWriter
from unicron_lib.training.environment import RankEnvironment

LONG_S = 0.25
"""An iteration that ends so long after the last one is told at once, and so is the first of a generation."""
LOOK = b"\n"
_VARYING = ("iteration", "loss", "iteration_s", "flops", "at", "compute_s", "grad_norm")


class ProgressLines:
    """Those of a rank in one generation, messages of the type Progress; `origin` are its fields on how it came to be there."""

    def __init__(self, env: RankEnvironment, send: Callable[[bytes], None], **origin: str | float) -> None:
        self._send = send
        self._left = LineWriter.open(env.lines_file)
        self._told_at = float("-inf")
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

    def tell(
        self, iteration: int, *, loss: float, iteration_s: float, flops: float, compute_s: float = 0.0, grad_norm: float = 0.0
    ) -> None:
        """An iteration ends now."""
        line = self._line(iteration, loss, iteration_s, flops, time.time(), compute_s, grad_norm)
        now = time.monotonic()
        if self._left is None or not self._left.leave(line):
            self._send(line)
        elif now - self._told_at >= LONG_S:
            self._send(LOOK)
        self._told_at = now

    def _line(self, *values: float) -> bytes:
        if isfinite(sum(values)):
            return self._template % values
        return json.dumps(self._fixed | dict(zip(_VARYING, values, strict=True))).encode() + b"\n"
