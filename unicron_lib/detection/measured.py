"""Which measurements of a job's throughput are news: planning knows what a job achieved, whatever is restarted."""

from collections.abc import Iterator, Mapping
from math import isfinite

from unicron_lib.domain.events import ThroughputMeasured
from unicron_lib.domain.jobs import JobState

NEWS = 1.1
"""A measurement is journalled when it is that many times what is known."""


def measurements(job: JobState, seen: Mapping[int, float], now: float, *, pool: str = "") -> Iterator[ThroughputMeasured]:
    """Events for sizes (GPUs -> best FLOP/s seen) that are new in `pool`, or clearly faster than the journal knows."""
    known = job.measured if pool == job.measured_in else {}
    for gpus, flops in seen.items():
        if isfinite(flops) and flops > NEWS * known.get(gpus, 0.0):
            yield ThroughputMeasured(
                id=f"measured/{job.submission}/{pool}/{job.generation}/{gpus}/{flops:.3e}",
                at=now,
                job=job.spec.job,
                submission=job.submission,
                num_gpus=gpus,
                flops=flops,
                pool=pool,
            )
