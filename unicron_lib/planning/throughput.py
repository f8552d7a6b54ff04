"""T(t, x): the FLOP/s of a job on each number of GPUs, given, measured, or guessed from what was measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError

SCALING = 0.95
"""Twice the GPUs are taken to give 2 ** 0.95 times the FLOP/s where nothing was measured."""

NOMINAL_FLOPS = 1e12
"""Stands for the FLOP/s of one GPU as long as no job of the cluster was ever measured: only ratios count then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Known `points` (GPUs to FLOP/s, at least one above zero) and what follows from them for other sizes.

    Between two points the FLOP/s follow a power of the size, outside of them the power is `SCALING`.
    """

    job: str
    points: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size, flops in self.points.items():
            if size < 1 or not (math.isfinite(flops) and flops >= 0):
                found = f"the throughput of {size} GPUs is {flops} FLOP/s"
                raise UserError(f"job {self.job}: {found}, it must be a finite number and not negative")

    def flops(self, size: int) -> float:
        """T(t, x) in FLOP/s, 0.0 for no GPU or when nothing is known."""
        if size in self.points:
            return self.points[size]
        known = sorted(x for x, flops in self.points.items() if flops > 0)
        if size < 1 or not known:
            return 0.0
        below = max((x for x in known if x < size), default=None)
        above = min((x for x in known if x > size), default=None)
        if below is not None and above is not None:
            power = math.log(self.points[above] / self.points[below]) / math.log(above / below)
            return float(self.points[below] * (size / below) ** power)
        nearest = known[0] if below is None else known[-1]
        return float(self.points[nearest] * (size / nearest) ** SCALING)


def profiles(specs: Sequence[JobSpec], measured: Mapping[str, Mapping[int, float]]) -> dict[str, Profile]:
    """The profile of each job: its own table, else its measurements, else the mean of the cluster's jobs per GPU.

    Raises UserError, with the job's name, for a number that is not finite or negative.
    """
    known = {
        spec.job: Profile(job=spec.job, points=dict(spec.throughput_flops or measured.get(spec.job, {}))) for spec in specs
    }
    per_gpu = [profile.flops(1) for profile in known.values() if profile.flops(1) > 0]
    typical = math.fsum(per_gpu) / len(per_gpu) if per_gpu else NOMINAL_FLOPS
    return {
        job: profile if profile.flops(1) > 0 else Profile(job=job, points=profile.points or {1: typical})
        for job, profile in known.items()
    }


def table(spec: JobSpec, profile: Profile, *, num_gpus: int, granularity_gpus: int = 1) -> dict[int, float]:
    """FLOP/s of each size that the job can be given of `num_gpus` GPUs, in multiples of `granularity_gpus`."""
    return {size: profile.flops(size) for size in spec.sizes(num_gpus) if size % granularity_gpus == 0}
