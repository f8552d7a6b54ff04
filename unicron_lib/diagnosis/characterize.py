"""What a cluster's jobs are like: the tables of the Acme paper (Hu et al., NSDI '24, sections 3 and 5) for any job table.

As there, only jobs with GPUs count, GPU time is GPUs times duration, and what timed out or lost its node has failed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unicron_lib.diagnosis.job_failures import Failures, failures_of
from unicron_lib.diagnosis.job_table import Floats, JobTable, Labels
from unicron_lib.errors import UserError

POINTS_S = tuple(float(2**power) for power in range(22))
"""Where the distributions of times are read, in seconds: 1 s to 24 days, the paper's."""
POINTS_GPUS = tuple(2**power for power in range(15))
MOST_TYPES = 12
"""Types of jobs that are told apart; the rest is one row."""
WHISKER = 1.5
"""Whiskers of a box reach to the last job within so many interquartile ranges (Tukey), as in the paper's figure."""

_STATES = {
    "completed": ("COMPLETED", "COMPLETE", "SUCCEEDED", "SUCCESS", "PASS", "TERMINATED", "DONE", "FINISHED"),
    "cancelled": ("CANCELLED", "CANCELED", "KILLED", "STOPPED", "REVOKED"),
    "failed": (
        "FAILED",
        "FAIL",
        "FAILURE",
        "ERROR",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "EVICTED",
    ),
    "preempted": ("PREEMPTED", "REQUEUED"),
    "unfinished": ("RUNNING", "PENDING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "WAITING", "QUEUED"),
}
STATES: Mapping[str, str] = MappingProxyType({theirs: ours for ours, names in _STATES.items() for theirs in names})
"""A scheduler's word for a state -> ours; any other is "unknown"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Jobs of one type or state. Shares are of all jobs with GPUs, between 0 and 1; GPU time in GPU-seconds."""

    name: str
    num_jobs: int
    jobs_share: float
    gpu_time_s: float
    gpu_time_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Times of `num_jobs` jobs, in seconds. `shares[i]` of them took `POINTS_S[i]` or less."""

    name: str
    num_jobs: int
    mean_s: float
    p10_s: float
    median_s: float
    p90_s: float
    p99_s: float
    max_s: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """How many GPUs jobs ask for: quartiles, and the least and most that are no outliers."""

    name: str
    num_jobs: int
    mean: float
    whisker_low: float
    q1: float
    median: float
    q3: float
    whisker_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Share of the jobs, and of the GPU time, of jobs with `gpus[i]` GPUs or fewer."""

    gpus: tuple[int, ...]
    jobs_shares: tuple[float, ...]
    gpu_time_shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Characterization:
    """All figures of a job table. `columns`, `left_out` and `unreadable` are those of the table."""

    num_jobs: int
    num_gpu_jobs: int
    num_cpu_jobs: int
    gpu_time_s: float
    points_s: tuple[float, ...]
    types: tuple[Share, ...]
    states: tuple[Share, ...]
    durations: tuple[Distribution, ...]
    queues: tuple[Distribution, ...]
    demand: tuple[Box, ...]
    sizes: Sizes
    failures: Failures
    columns: Mapping[str, str]
    left_out: Mapping[str, int]
    unreadable: Mapping[str, int]


def characterize(table: JobTable) -> Characterization:
    """The figures of `table`; those that have a row a type begin with a row "all". Raises UserError without GPU jobs."""
    is_gpu_job = table.gpus > 0
    if not is_gpu_job.any():
        raise UserError(f"none of the {len(table.gpus)} jobs has a GPU (column {table.columns['gpus']})")
    jobs = table.where(is_gpu_job)
    gpu_time = jobs.gpus * np.nan_to_num(jobs.duration_s)
    types = jobs.types.mapped(lambda name: name or "untold").folded(gpu_time, MOST_TYPES)
    states = jobs.states.mapped(state_of).folded(gpu_time, len(_STATES) + 1)
    return Characterization(
        num_jobs=len(table.gpus),
        num_gpu_jobs=len(jobs.gpus),
        num_cpu_jobs=len(table.gpus) - len(jobs.gpus),
        gpu_time_s=float(gpu_time.sum()),
        points_s=POINTS_S,
        types=tuple(_shares(types, gpu_time)),
        states=tuple(_shares(states, gpu_time)),
        durations=tuple(_distribution(name, it) for name, it in _by_type(types, jobs.duration_s) if len(it)),
        queues=tuple(_distribution(name, it) for name, it in _by_type(types, jobs.queue_s) if len(it)),
        demand=tuple(_box(name, it) for name, it in _by_type(types, jobs.gpus)),
        sizes=_sizes(jobs.gpus, gpu_time),
        failures=failures_of(jobs, gpu_time, is_failed=_is(states, "failed")),
        columns=table.columns,
        left_out=table.left_out,
        unreadable=table.unreadable,
    )


def as_json(found: Characterization) -> dict[str, Any]:
    """The answer of `unicron characterize --json`."""
    return asdict(found)


def state_of(word: str) -> str:
    """Our name for a state of a scheduler's: "CANCELLED by 1000" is cancelled."""
    first = word.split(maxsplit=1)[:1]
    return STATES.get(first[0].upper().rstrip("+"), "unknown") if first else "unknown"


def _is(labels: Labels, name: str) -> NDArray[np.bool_]:
    return np.isin(labels.codes, [code for code, it in enumerate(labels.names) if it == name])


def _shares(labels: Labels, gpu_time: Floats) -> Iterator[Share]:
    counts = np.bincount(labels.codes, minlength=len(labels.names))
    times = np.bincount(labels.codes, weights=gpu_time, minlength=len(labels.names))
    total = times.sum() or 1.0
    for name, count, time in zip(labels.names, counts.tolist(), times.tolist(), strict=True):
        jobs_share = count / len(labels.codes)
        yield Share(name=name, num_jobs=count, jobs_share=jobs_share, gpu_time_s=time, gpu_time_share=float(time / total))


def _by_type(types: Labels, values: Floats) -> Iterator[tuple[str, Floats]]:
    """The known values of all jobs, then of each type if there are several."""
    is_known = ~np.isnan(values)
    yield "all", values[is_known]
    if len(types.names) > 1:
        yield from ((name, values[is_known & (types.codes == code)]) for code, name in enumerate(types.names))


def _distribution(name: str, times: Floats) -> Distribution:
    ordered = np.sort(times)
    p10, median, p90, p99 = np.percentile(ordered, [10, 50, 90, 99]).tolist()
    shares = np.searchsorted(ordered, POINTS_S, side="right") / len(ordered)
    quantiles = {"p10_s": p10, "median_s": median, "p90_s": p90, "p99_s": p99, "max_s": float(ordered[-1])}
    return Distribution(
        name=name, num_jobs=len(ordered), mean_s=float(ordered.mean()), shares=tuple(shares.tolist()), **quantiles
    )


def _box(name: str, gpus: Floats) -> Box:
    q1, median, q3 = np.percentile(gpus, [25, 50, 75]).tolist()
    reach = WHISKER * (q3 - q1)
    # between two jobs, a quartile may lie outside of what is no outlier
    low = min(q1, float(gpus[gpus >= q1 - reach].min()))
    high = max(q3, float(gpus[gpus <= q3 + reach].max()))
    mean = float(gpus.mean())
    return Box(name=name, num_jobs=len(gpus), mean=mean, whisker_low=low, q1=q1, median=median, q3=q3, whisker_high=high)


def _sizes(gpus: Floats, gpu_time: Floats) -> Sizes:
    order = np.argsort(gpus, kind="stable")
    until = np.searchsorted(gpus[order], POINTS_GPUS, side="right")
    times = np.concatenate([[0.0], np.cumsum(gpu_time[order])])
    last = int(np.searchsorted(POINTS_GPUS, gpus.max())) + 1
    shares = (until / len(gpus), times[until] / (times[-1] or 1.0))
    jobs_shares, gpu_time_shares = (tuple(it[:last].tolist()) for it in shares)
    return Sizes(gpus=POINTS_GPUS[:last], jobs_shares=jobs_shares, gpu_time_shares=gpu_time_shares)
