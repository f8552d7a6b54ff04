"""Workloads by name: the six jobs of the paper's traces, its five cases, a fleet of any number of jobs, or those of a file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unicron_lib.errors import UserError
from unicron_lib.planning import scenario_text
from unicron_lib.simulation import job_tables
from unicron_lib.simulation.cases import CASES, FITTED, jobs_of, trace_jobs
from unicron_lib.simulation.workload import SimJob

MIXED_NODES = 22
"""The six mixed jobs can use so many nodes of 8 GPUs."""

FLEET_STEPS = 16
FLEET_FLOPS, FLEET_POWER = 140e12, 0.98
"""Of one GPU, and how the speed of a fleet's job grows with its GPUs: assumed."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs, what they are called, and which of their inputs were fitted to published results."""

    name: str
    jobs: tuple[SimJob, ...]
    fitted: tuple[str, ...] = ()


class _Job(BaseModel):
    """A job of a file; keys of `unicron plan` that do not matter here are skipped."""

    model_config = ConfigDict(frozen=True)

    job: Annotated[str, Field(min_length=1)]
    throughput_flops: Annotated[dict[Annotated[int, Field(ge=1)], Positive], Field(min_length=1)]
    weight: Positive = 1.0
    min_gpus: Annotated[int, Field(ge=1)] = 1
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    num_params: Positive | None = None
    iteration_s: Positive = 10.0
    checkpoint_s: Positive = 1800.0
    arrives_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    work_flop: Positive | None = None

    def as_job(self) -> SimJob:
        """Of the sizes that it may have. A model that is not told is the largest that its smallest size has memory for."""
        most = self.max_gpus or inf
        table = {size: flops for size, flops in self.throughput_flops.items() if self.min_gpus <= size <= most}
        if not table:
            raise UserError(f"job {self.job} lists no throughput for a size from min_gpus to max_gpus")
        largest = min(table) * job_tables.GPU_BYTES / job_tables.PARAM_BYTES
        return SimJob(
            job=self.job,
            weight=self.weight,
            throughput_flops=dict(sorted(table.items())),
            num_params=self.num_params or largest,
            iteration_s=self.iteration_s,
            checkpoint_s=self.checkpoint_s,
            arrives_s=self.arrives_s,
            work_flop=self.work_flop or inf,
        )


class _Jobs(BaseModel):
    jobs: Annotated[tuple[_Job, ...], Field(min_length=1)]


def named(text: str, *, num_nodes: int, gpus_per_node: int) -> Workload:
    """The workload called `text`: mixed, case-1 to case-5, fleet-N, or a file. Raises UserError for anything else."""
    cases = {f"case-{case}": case for case in CASES}
    kind, _, number = text.partition("-")
    if text == "mixed":
        return Workload(name=text, jobs=trace_jobs(), fitted=FITTED)
    if text in cases:
        return Workload(name=text, jobs=jobs_of(cases[text]))
    if kind == "fleet" and number.isdecimal() and int(number):
        return Workload(name=text, jobs=fleet(int(number), num_nodes=num_nodes, gpus_per_node=gpus_per_node))
    if Path(text).exists():
        return Workload(name=text, jobs=from_file(Path(text), most_gpus=num_nodes * gpus_per_node))
    raise UserError(f"there are no jobs {text}: give mixed, {', '.join(cases)}, fleet-N, or a file that exists")


def usual(num_nodes: int) -> str:
    """The name of what is simulated if nothing is said: mixed, and on larger clusters as many jobs as keep it busy."""
    return "mixed" if num_nodes <= MIXED_NODES else f"fleet-{min(64, num_nodes // 4)}"


def fleet(num_jobs: int, *, num_nodes: int, gpus_per_node: int = 8) -> tuple[SimJob, ...]:
    """Jobs of whole nodes and four weights; each could use twice its share. Raises UserError for more jobs than nodes."""
    if num_jobs > num_nodes:
        raise UserError(f"a fleet of {num_jobs} jobs needs as many nodes, the cluster has {num_nodes}")
    share = num_nodes // num_jobs
    step = -(-2 * share // FLEET_STEPS)
    sizes = [nodes * gpus_per_node for nodes in range(step, 2 * share + 1, step)]
    table = {size: FLEET_FLOPS * size**FLEET_POWER for size in sizes}
    num_params = sizes[0] * job_tables.GPU_BYTES / job_tables.PARAM_BYTES
    return tuple(
        SimJob(job=f"job-{n:03d}", weight=(0.5, 1.0, 1.5, 2.0)[n % 4], throughput_flops=table, num_params=num_params)
        for n in range(num_jobs)
    )


def from_file(path: Path, *, most_gpus: int) -> tuple[SimJob, ...]:
    """The jobs of a table of Acme (.csv), or of a scenario as `unicron plan` reads it (YAML or JSON).

    A table's jobs of more than `most_gpus` GPUs are left out. A scenario's job may also have num_params, iteration_s,
    checkpoint_s, arrives_s and work_flop. Raises UserError with one sentence for whatever is wrong.
    """
    if path.suffix.lower() == ".csv":
        jobs = job_tables.as_workload(job_tables.acme(path), most_gpus=most_gpus)
    else:
        jobs = _parse(path, scenario_text.load(path))
    twice = next((name for name, times in Counter(job.job for job in jobs).items() if times > 1), None)
    if twice or not jobs:
        raise UserError(f"{path} has {f'two jobs {twice}' if twice else f'no job of {most_gpus} GPUs or fewer'}")
    return jobs


def _parse(path: Path, document: Any) -> tuple[SimJob, ...]:
    if not isinstance(document, Mapping):
        raise UserError(f"{path} must be a mapping with the key jobs")
    try:
        return tuple(job.as_job() for job in _Jobs.model_validate(document).jobs)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}, {where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
