"""Why jobs failed, after how long, and how long it took until they ran again (the Acme paper's table 3)."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from unicron_lib.diagnosis.job_table import NO_THREAD, Floats, JobTable, Labels

Flags = NDArray[np.bool_]

MOST_REASONS = 40
UNEXPLAINED = "unexplained"

_REASONS = {
    "infrastructure": (
        *("nvlink", "cuda", "node failure", "node fail", "boot fail", "ecc", "network", "connection", "s3 storage", "storage"),
        *("nccl timeout", "nccl remote", "node lost", "gpu lost", "gpu driver", "invalid dma mapping", "link flapping"),
        *("connection refused", "connection reset", "illegal memory access", "straggler"),
    ),
    "framework": (
        *("dataloader killed", "dataloader", "attribute", "out of memory", "runtime", "assertion", "value", "zero division"),
        *("model loading", "dataset loading", "loss anomaly", "task hang"),
    ),
    "script": (
        *("file not found", "os", "type", "name", "permission", "import", "key", "syntax", "argument", "called process"),
        *("index", "user", "module not found"),
    ),
}
CATEGORIES: Mapping[str, str] = MappingProxyType({reason: of for of, reasons in _REASONS.items() for reason in reasons})
"""A reason in small words without "error" -> its category: the paper's table, and our kinds of failure."""

_SUFFIX = re.compile(r"[ _]?err(?:or)?\Z", re.IGNORECASE)
_STATES_THAT_TELL = frozenset({"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "EVICTED"})
_WAITS = frozenset({"priority", "resources", "dependency", "begintime", "cleaning", "prolog", "partitiontimelimit"})
"""What Slurm calls the reason of a job is why it waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Failed jobs of one reason or category.

    Shares are of all failed jobs, between 0 and 1. Times in seconds; None where no job tells. To failure counts from the
    start of the job, to restart from its failure until its next run starts: `num_restarted` jobs have one.
    """

    name: str
    category: str
    num: int
    num_share: float
    gpu_time_s: float
    gpu_time_share: float
    gpus_mean: float
    gpus_median: float
    to_failure_mean_s: float | None
    to_failure_median_s: float | None
    num_restarted: int
    to_restart_mean_s: float | None
    to_restart_median_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """All failed jobs, by category and by reason, those that cost the most GPU time first."""

    num: int
    gpu_time_s: float
    categories: tuple[Cause, ...]
    reasons: tuple[Cause, ...]


def failures_of(jobs: JobTable, gpu_time: Floats, *, is_failed: Flags) -> Failures:
    """The failed ones of `jobs`, which holds all runs: the next one after a failure is its restart."""
    failed, cost = jobs.where(is_failed), gpu_time[is_failed]
    to_failure = _between(failed.started_at, failed.failed_at, otherwise=failed.duration_s)
    to_restart = _to_restart(jobs, is_failed)
    reasons = _reasons(failed)
    categories = _categories(failed, reasons)

    def causes(labels: Labels, category_of: Callable[[Flags], str]) -> Iterator[Cause]:
        for code, name in enumerate(labels.names):
            mask = labels.codes == code
            yield _cause(name, category_of(mask), mask, failed.gpus, cost, to_failure, to_restart)

    def category(mask: Flags) -> str:
        codes = np.unique(categories.codes[mask])
        return categories.names[codes[0]] if len(codes) == 1 else "several"

    by_reason = reasons.folded(cost, MOST_REASONS)
    by_category = categories.folded(cost, MOST_REASONS)
    return Failures(
        num=len(cost),
        gpu_time_s=float(cost.sum()),
        categories=tuple(causes(by_category, category)),
        reasons=tuple(causes(by_reason, category)),
    )


def category_of(reason: str) -> str:
    """Whose failure a reason is: infrastructure, framework, script or unknown. `NVLink Error` is `nvlink_error`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", _SUFFIX.sub("", reason.strip())).lower()
    return CATEGORIES.get(re.sub(r"[^a-z0-9]+", " ", words).strip(), "unknown")


def _reasons(failed: JobTable) -> Labels:
    """The told reason, else the state where it tells more than that the job failed."""
    pairs = Labels.paired(failed.reasons, failed.states)
    return pairs.mapped(lambda both: _reason(*both.split("\0")))


def _reason(reason: str, state: str) -> str:
    if reason and reason.lower() not in _WAITS:
        return reason
    return state.upper() if state.upper() in _STATES_THAT_TELL else UNEXPLAINED


def _categories(failed: JobTable, reasons: Labels) -> Labels:
    pairs = Labels.paired(failed.categories, reasons)

    def choose(both: str) -> str:
        told, reason = both.split("\0")
        return told.lower() or category_of(reason)

    return pairs.mapped(choose)


def _cause(name: str, category: str, mask: Flags, gpus: Floats, cost: Floats, to_failure: Floats, to_restart: Floats) -> Cause:
    failing, restarting = (times[mask & ~np.isnan(times)] for times in (to_failure, to_restart))
    return Cause(
        name=name,
        category=category,
        num=int(mask.sum()),
        num_share=float(mask.mean()),
        gpu_time_s=float(cost[mask].sum()),
        gpu_time_share=float(cost[mask].sum() / (cost.sum() or 1.0)),
        gpus_mean=float(gpus[mask].mean()),
        gpus_median=float(np.median(gpus[mask])),
        to_failure_mean_s=float(failing.mean()) if len(failing) else None,
        to_failure_median_s=float(np.median(failing)) if len(failing) else None,
        num_restarted=len(restarting),
        to_restart_mean_s=float(restarting.mean()) if len(restarting) else None,
        to_restart_median_s=float(np.median(restarting)) if len(restarting) else None,
    )


def _between(since: Floats, until: Floats, *, otherwise: Floats) -> Floats:
    span = until - since
    return np.where(span >= 0, span, otherwise)


def _to_restart(jobs: JobTable, is_failed: Flags) -> Floats:
    """Seconds from each failure until the next run of the same job starts, NaN if there is none."""
    failed_at = np.where(np.isnan(jobs.failed_at), jobs.ended_at, jobs.failed_at)
    found = np.where(np.isnan(jobs.restarted_at), _next_start(jobs, failed_at, is_failed), jobs.restarted_at)
    span = (found - failed_at)[is_failed]
    return np.where(span >= 0, span, np.nan)


def _next_start(jobs: JobTable, failed_at: Floats, is_failed: Flags) -> Floats:
    """When a run of the same thread first starts at or after `failed_at`, for the failed jobs."""
    starts = np.full(len(failed_at), np.nan)
    runs = np.flatnonzero((jobs.thread != NO_THREAD) & ~np.isnan(jobs.started_at))
    asked = runs[is_failed[runs] & ~np.isnan(failed_at[runs])]
    if not len(asked):
        return starts
    threads = np.unique(jobs.thread[runs], return_inverse=True)[1]
    number = np.zeros(len(failed_at), dtype=np.int64)
    number[runs] = threads
    # one number orders runs by thread, then by start: a million threads of a year each are exact in a double
    first = jobs.started_at[runs].min()
    stride = max(jobs.started_at[runs].max(), failed_at[asked].max()) - first + 1.0
    order = runs[np.lexsort((runs, jobs.started_at[runs], number[runs]))]
    keys = number[order] * stride + (jobs.started_at[order] - first)
    place = np.searchsorted(keys, number[asked] * stride + (failed_at[asked] - first))
    # a job that failed as it started is not its own restart
    place += (place < len(order)) & (order[np.minimum(place, len(order) - 1)] == asked)
    is_there = place < len(order)
    asked, follower = asked[is_there], order[place[is_there]]
    is_same = number[follower] == number[asked]
    starts[asked[is_same]] = jobs.started_at[follower[is_same]]
    return starts
