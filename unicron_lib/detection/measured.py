"""Which measurements of a job's throughput are news: planning knows what a job achieved, whatever is restarted."""

from collections.abc import Iterator, Mapping
from math import isfinite

from unicron_lib.domain.events import ThroughputMeasured
from unicron_lib.domain.jobs import JobState

NEWS = 1.1
"""A measurement is journalled when it is that many times what is known."""


def measurements(
    job: JobState, seen: Mapping[int, float], now: float, *, generation: int, pool: str = ""
) -> Iterator[ThroughputMeasured]:
    """Events for sizes (GPUs -> best FLOP/s seen) that are new in `pool`, or clearly faster than the journal knows.

    They were seen in `generation`: of a job with several layouts, what is not known to be of one of them is left out.
    """
    shape = _shape(job, generation)
    if shape is None:
        return
    of_the_shape = job.measured_by_shape.get(shape, {}) if shape else job.measured
    known = of_the_shape if pool == job.measured_in else {}
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
                shape=shape,
            )


def _shape(job: JobState, generation: int) -> str | None:
    """How the generation's replicas are cut, "" for a job of one layout; None if nobody knows."""
    if not job.spec.parallel_layouts:
        return ""
    placed = (it for it in (job.pending, job.assignment) if it and it.generation == generation)
    return next((it.layout.shape for it in placed), None)
