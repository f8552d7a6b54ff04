"""Tables of jobs as workloads: which job came when, on how many GPUs, for how long.

Two formats of Acme are read: its own (`job_id`, `gpu_num`, `submit_time`, `duration`; a job that ran), and a fork's
(`job_id`, `arrival_time`, `gpu_workers`, `num_iteration`, of half a second each; what else it has was made up by the fork).
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from unicron_lib.errors import UserError
from unicron_lib.simulation.traces import read_text
from unicron_lib.simulation.workload import SimJob

FORK_ITERATION_S = 0.5
"""One iteration of the fork's table lasts so long, whatever the job."""

GPU_BYTES, PARAM_BYTES = 70e9, 18
"""Usable memory of a GPU, and what training needs for a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableJob:
    """A job of a table; `arrives_s` counts from the first one."""

    job: str
    arrives_s: float
    num_gpus: int
    duration_s: float


def acme(path: Path) -> tuple[TableJob, ...]:
    """The jobs with at least one GPU and some duration, in the order of arrival. Raises UserError for another table."""
    lines = read_text(path).splitlines()
    rows = csv.DictReader(lines)
    columns = set(rows.fieldnames or ())
    reads = next((reads for needed, reads in _READERS if needed <= columns), None)
    if reads is None:
        needed = "job_id, gpu_num, submit_time and duration"
        raise UserError(f"{path} is no table of Acme: it needs {needed}, it has {_list(columns)}")
    jobs = []
    for row in rows:
        try:
            jobs.append(reads(row))
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{path}, line {rows.line_num}: {error}") from error
    kept = sorted((job for job in jobs if job.num_gpus and job.duration_s > 0), key=lambda job: job.arrives_s)
    if not kept:
        raise UserError(f"{path} holds no job that used a GPU")
    start_s = kept[0].arrives_s
    return tuple(
        TableJob(job=job.job, arrives_s=job.arrives_s - start_s, num_gpus=job.num_gpus, duration_s=job.duration_s)
        for job in kept
    )


def as_workload(jobs: Sequence[TableJob], *, flops_gpu: float = 140e12, most_gpus: int | None = None) -> tuple[SimJob, ...]:
    """Jobs that do in `duration_s` on `num_gpus` GPUs all they have to do, at `flops_gpu` FLOP/s each, on any halving of them.

    A table knows neither models nor how speed depends on the size: it is in proportion here, and the model is the
    largest that the smallest size has memory for. Jobs of more than `most_gpus` are left out.
    """
    return tuple(
        SimJob(
            job=f"job-{table.job}",
            weight=1.0,
            throughput_flops={size: size * flops_gpu for size in _halvings(table.num_gpus)},
            num_params=min(_halvings(table.num_gpus)) * GPU_BYTES / PARAM_BYTES,
            arrives_s=table.arrives_s,
            work_flop=table.num_gpus * flops_gpu * table.duration_s,
        )
        for table in jobs
        if most_gpus is None or table.num_gpus <= most_gpus
    )


def _halvings(num_gpus: int) -> list[int]:
    """The size, a half and a quarter of it, as far as they are whole."""
    return [num_gpus // part for part in (1, 2, 4) if num_gpus % part == 0]


def _own(row: Mapping[str, str]) -> TableJob:
    arrives_s = datetime.fromisoformat(row["submit_time"]).timestamp()
    return _job(row["job_id"], arrives_s, float(row["gpu_num"]), float(row["duration"]))


def _fork(row: Mapping[str, str]) -> TableJob:
    duration_s = float(row["num_iteration"]) * FORK_ITERATION_S
    return _job(row["job_id"], float(row["arrival_time"]), float(row["gpu_workers"]), duration_s)


def _job(job: str, arrives_s: float, num_gpus: float, duration_s: float) -> TableJob:
    if not (isfinite(arrives_s) and isfinite(duration_s) and num_gpus >= 0 and num_gpus == int(num_gpus)):
        raise ValueError(f"job {job} has {num_gpus:g} GPUs, arrives at {arrives_s:g} and lasts {duration_s:g} s")
    return TableJob(job=job, arrives_s=arrives_s, num_gpus=int(num_gpus), duration_s=duration_s)


def _list(columns: set[str]) -> str:
    return ", ".join(sorted(columns)[:12]) or "none"


_READERS = (
    ({"job_id", "gpu_num", "submit_time", "duration"}, _own),
    ({"job_id", "arrival_time", "gpu_workers", "num_iteration"}, _fork),
)
