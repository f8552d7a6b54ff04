"""What an allocation is worth: the objective of the Unicron paper, section 5, job by job.

WAF is the weighted achieved aggregate FLOP/s. A job t that goes from x to x' GPUs in a cluster of n' healthy ones gains

    G(t, x') = w * T(x') * D_running(n')  -  [x' != x or t is faulted] * w * T(x) * D_transition

FLOP until the next failure is expected. It is not floored at zero: stopping a job costs what its transition costs, and
launching a waiting one is free, since T(0) = 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_lib.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A job as the allocation sees it.

    `throughput_flops` maps each size that the job can be given to its FLOP/s, T(t, x') (size 0 is implied, unless
    `must_run`); `current_flops` is T(t, x), of the present size. `transition_s` is D_transition, and `relayout_s` what is
    added to it on sizes where the job has another layout.
    Raises UserError, with the job's name, for a number that is not finite or negative.
    """

    job: str
    throughput_flops: Mapping[int, float]
    weight: float = 1.0
    current_gpus: int = 0
    current_flops: float = 0.0
    faulted: bool = False
    must_run: bool = False
    transition_s: float = 0.0
    relayout_s: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size, flops in self.throughput_flops.items():
            if size < 1:
                raise UserError(f"job {self.job}: throughput_flops has the size {size}, sizes are 1 GPU or more")
            self._check(f"throughput_flops of {size} GPUs", flops)
        self._check("the throughput of its present size", self.current_flops)
        self._check("weight", self.weight)
        self._check("transition_s", self.transition_s)

    def _check(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"job {self.job}: {name} is {value}, it must be a finite number and not negative")

    @property
    def min_gpus(self) -> int:
        """The smallest size that lets the job run, 0 if none does."""
        return min(self.throughput_flops, default=0)

    def sizes(self, num_gpus: int) -> tuple[int, ...]:
        """What the job may get of `num_gpus` GPUs, ascending; without 0 if it must run."""
        running = tuple(size for size in sorted(self.throughput_flops) if size <= num_gpus)
        return running if self.must_run else (0, *running)


def running_s(mtbf_gpu_s: float, num_gpus: int) -> float:
    """D_running(n'): seconds until the next failure of `num_gpus` GPUs is expected, 0 for none."""
    return mtbf_gpu_s / num_gpus if num_gpus else 0.0


def earnings(demand: Demand, size: int, *, expected_s: float) -> float:
    """FLOP, weighted, that the job does on `size` GPUs in `expected_s` seconds."""
    return waf_flops(demand, size) * expected_s


def cost(demand: Demand, size: int) -> float:
    """FLOP, weighted, that the job loses in its transition to `size` GPUs; 0 if there is none."""
    moves = size != demand.current_gpus or demand.faulted
    seconds = demand.transition_s + demand.relayout_s.get(size, 0.0)
    return demand.weight * demand.current_flops * seconds if moves else 0.0


def gain(demand: Demand, size: int, *, expected_s: float) -> float:
    """G(t, x') in FLOP for x' = `size`, when `expected_s` seconds pass until the next failure."""
    return earnings(demand, size, expected_s=expected_s) - cost(demand, size)


def waf_flops(demand: Demand, size: int) -> float:
    """The weighted FLOP/s of the job on `size` GPUs: F(t, x)."""
    return demand.weight * demand.throughput_flops[size] if size else 0.0
