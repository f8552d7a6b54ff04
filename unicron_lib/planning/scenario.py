"""The scenario file of `unicron plan`: what-if, without a cluster."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import UserError
from unicron_lib.planning import explain, scenario_layouts, scenario_model, scenario_outlook, scenario_placement, scenario_text
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.fitting import Fitted
from unicron_lib.planning.layout_choice import Choice
from unicron_lib.planning.waf import Demand

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Source = Literal["replica", "peer_memory", "store"]


OnNode = Annotated[
    Annotated[tuple[str, ...], Tag("[names]")] | Annotated[Mapping[str, Annotated[int, Field(ge=1)]], Tag("[numbers]")],
    Discriminator(lambda value: "[numbers]" if isinstance(value, Mapping) else "[names]"),
]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cluster(_Keys):
    """The cluster before the loss; `mtbf_gpu_s` is the mean time between failures of one GPU, in seconds.

    `gpu` is what jobs that are described by their model are reckoned on.
    """

    num_nodes: Annotated[int, Field(ge=1, le=100_000)]
    gpus_per_node: Annotated[int, Field(ge=1, le=1_000)]
    mtbf_gpu_s: Positive
    gpu: scenario_model.Gpu = "a100"


class Job(_Keys):
    """A job of the scenario; `transition_s` may be left out if the job does not run.

    With a `model`, `throughput_flops` is what was measured, if anything: it calibrates the model, which gives the rest.
    `parallel_layouts` are those among which it may choose, maybe with tables of their own; without any, a model has them all.
    `transition_s_from` is what moving costs by where the state comes from; for `state_from` it goes before `transition_s`.
    """

    job: Annotated[str, Field(min_length=1)]
    throughput_flops: Mapping[Annotated[int, Field(ge=1)], NotNegative] = Field(default_factory=dict)
    model: scenario_model.GptModel | None = None
    parallel_layouts: tuple[ParallelLayout, ...] = ()
    weight: Positive = 1.0
    current_gpus: Count = 0
    faulted: bool = False
    min_gpus: Annotated[int, Field(ge=1)] = 1
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    must_run: bool = False
    transition_s: NotNegative | None = None
    transition_s_from: Mapping[Source, NotNegative] = Field(default_factory=dict)
    state_from: Source = "replica"

    @property
    def cost_s(self) -> float:
        """D_transition for the source that the job's state comes from, in seconds."""
        return self.transition_s_from.get(self.state_from, self.transition_s or 0.0)


class Scenario(_Keys):
    """A cluster, what it loses, and the jobs that share the rest.

    `nodes` may say by name which jobs train on a node, so that its loss can be asked for; if it also says on how many GPUs,
    jobs are placed, at most `max_jobs_per_node` on a node. With an `outlook` the answer
    to a loss has alternatives.
    """

    cluster: Cluster
    jobs: Annotated[tuple[Job, ...], Field(min_length=1)]
    lost_nodes: Count = 0
    nodes: Mapping[str, OnNode] = Field(default_factory=dict)
    max_jobs_per_node: Annotated[int, Field(ge=1)] | None = None
    granularity_gpus: Annotated[int, Field(ge=1)] | None = None
    time_limit_s: NotNegative = 10.0
    outlook: scenario_outlook.NodeOutlook | None = None

    @property
    def num_gpus(self) -> int:
        """Healthy GPUs, n'."""
        return (self.cluster.num_nodes - self.lost_nodes) * self.cluster.gpus_per_node

    @property
    def step(self) -> int:
        """GPUs that allocations are multiples of."""
        return self.granularity_gpus or self.cluster.gpus_per_node

    @property
    def total_gpus(self) -> int:
        """GPUs before the loss."""
        return self.cluster.num_nodes * self.cluster.gpus_per_node


def read(path: Path) -> Scenario:
    """Read a scenario from a YAML or JSON file. Raises UserError with one sentence for whatever is wrong in it."""
    return parse(scenario_text.load(path))


def parse(document: object) -> Scenario:
    """Check a scenario. Raises UserError with one sentence that names the job and the key."""
    if not isinstance(document, Mapping):
        raise UserError("a scenario is a mapping with the keys cluster and jobs")
    try:
        scenario = Scenario.model_validate(document)
    except ValidationError as error:
        raise UserError(scenario_text.sentence(error, document)) from None
    _check_capacity(scenario)
    _check_nodes(scenario)
    for job in scenario.jobs:
        _check_job(job)
        _check_model(scenario, job)
    return scenario


def answer(scenario: Scenario, *, timer: Callable[[], float]) -> dict[str, Any]:
    """The object that `unicron plan --json` prints. Raises NotEnoughGpus if the jobs that must run do not fit."""
    demands = demands_of(scenario)
    request = Request(demands=demands, num_gpus=scenario.num_gpus, mtbf_gpu_s=scenario.cluster.mtbf_gpu_s)
    share = partial(allocate, timer=timer, time_limit_s=scenario.time_limit_s)
    placed = _placed(scenario, request, share)
    allocation = placed.allocation if placed else share(request)
    found = {
        "gpus": allocation.gpus,
        "layout": layouts_of(scenario, _running(allocation.gpus)),
        "gain": allocation.gain,
        "upper_bound": allocation.upper_bound,
        "gap": allocation.gap,
        "optimal": allocation.optimal,
        "method": allocation.method,
        "solve_s": allocation.solve_s,
        "reason": _reason(scenario, allocation, demands, placed.notes if placed else ()),
    }
    found |= scenario_placement.as_json(placed.placement) if placed else {}
    return found | _alternatives(scenario, demands, timer)


def _placed(scenario: Scenario, request: Request, share: Callable[[Request], Allocation]) -> Fitted | None:
    """Allocation and placement, None unless the scenario says where its jobs are."""
    nodes = scenario_placement.counted(scenario.nodes)
    if nodes is None:
        return None
    return scenario_placement.fitted(
        request,
        nodes,
        num_nodes=scenario.cluster.num_nodes - scenario.lost_nodes,
        gpus_per_node=scenario.cluster.gpus_per_node,
        groups=lambda gpus: {job: layout["tp"] for job, layout in layouts_of(scenario, _running(gpus)).items()},
        max_jobs_per_node=scenario.max_jobs_per_node,
        share=share,
    )


def _running(gpus: Mapping[str, int]) -> dict[str, int]:
    return {job: num_gpus for job, num_gpus in gpus.items() if num_gpus}


def _alternatives(scenario: Scenario, demands: tuple[Demand, ...], timer: Callable[[], float]) -> dict[str, Any]:
    """The key `alternatives` of the answer, if the scenario asks for it and has lost something."""
    if scenario.outlook is None or not scenario.lost_nodes:
        return {}
    cluster = scenario.cluster.model_dump(exclude={"gpu"})
    loss = scenario_outlook.loss_of(demands, lost_nodes=scenario.lost_nodes, **cluster)
    return {"alternatives": scenario_outlook.as_json(scenario_outlook.weighed(scenario.outlook, loss, timer=timer))}


def demands_of(scenario: Scenario) -> tuple[Demand, ...]:
    """The jobs as the allocation sees them. A present size that the table lacks counts as T = 0 (paper: F = 0)."""
    step = scenario.step
    tables = {job.job: flops_of(scenario, job) for job in scenario.jobs}
    return tuple(
        Demand(
            job=job.job,
            throughput_flops={
                size: flops
                for size, flops in tables[job.job].items()
                if job.min_gpus <= size <= (job.max_gpus or size) and size % step == 0
            },
            weight=job.weight,
            current_gpus=job.current_gpus,
            current_flops=tables[job.job].get(job.current_gpus, 0.0),
            faulted=job.faulted,
            must_run=job.must_run,
            transition_s=job.cost_s,
        )
        for job in scenario.jobs
    )


def flops_of(scenario: Scenario, job: Job) -> Mapping[int, float]:
    """T(t, x): the table of the job, or what its model gives on the sizes that the cluster has room for."""
    if job.model is None and not job.parallel_layouts:
        return job.throughput_flops
    offered = range(scenario.step, min(scenario.total_gpus, job.max_gpus or scenario.total_gpus) + 1, scenario.step)
    sizes = {*offered, *([job.current_gpus] if job.current_gpus else [])}
    cluster = scenario.cluster
    if chosen := _choice(scenario, job):
        return {size: chosen.flops(size) for size in sorted(sizes) if chosen.allowed(size)}
    assert job.model is not None
    return scenario_model.table(
        job.model, gpu=cluster.gpu, gpus_per_node=cluster.gpus_per_node, sizes=sizes, measured=job.throughput_flops
    )


def layouts_of(scenario: Scenario, gpus: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The best layout of each job on its GPUs; data parallelism only for a job without a model or layouts of its own."""
    found: dict[str, dict[str, int]] = {}
    for job in scenario.jobs:
        if num_gpus := gpus.get(job.job, 0):
            layout = _layout(scenario, job, num_gpus)
            found[job.job] = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    return found


def _layout(scenario: Scenario, job: Job, num_gpus: int) -> Layout:
    cluster = scenario.cluster
    if chosen := _choice(scenario, job):
        return next((it.layout for it in chosen.ranked(num_gpus)), Layout(dp=num_gpus))
    if job.model is None:
        return Layout(dp=num_gpus)
    return scenario_model.layout(job.model, num_gpus, gpu=cluster.gpu, gpus_per_node=cluster.gpus_per_node)


def _choice(scenario: Scenario, job: Job) -> Choice | None:
    """What a job that names its layouts chooses from."""
    if not job.parallel_layouts:
        return None
    device = scenario_model.device(scenario.cluster.gpu, scenario.cluster.gpus_per_node)
    model = job.model.described() if job.model else None
    return scenario_layouts.choice(job.parallel_layouts, job.throughput_flops, model=model, device=device)


def _layout_notes(scenario: Scenario, gpus: Mapping[str, int]) -> tuple[str, ...]:
    """Why jobs with a choice have their layouts."""
    choices = ((job, chosen) for job in scenario.jobs if gpus[job.job] and (chosen := _choice(scenario, job)))
    named = (scenario_layouts.layouts(it.job, gpus[it.job], chosen).told(it.job, gpus[it.job], None) for it, chosen in choices)
    free = sorted(job.job for job in scenario.jobs if gpus[job.job] and job.model and not job.parallel_layouts)
    best = {name: "tp={tp} pp={pp} dp={dp}".format(**layout) for name, layout in layouts_of(scenario, gpus).items()}
    shown = (f"{name} runs in {best[name]}: the fastest by the model of all that fit on {gpus[name]} GPUs" for name in free)
    return (*named, *shown)


def _reason(scenario: Scenario, allocation: Allocation, demands: tuple[Demand, ...], notes: tuple[str, ...]) -> str:
    lost = scenario.lost_nodes
    faulted = sorted(job.job for job in scenario.jobs if job.faulted)
    cause = f"{lost} node{'s are' if lost > 1 else ' is'} lost" if lost else "No node is lost"
    cause += f", a worker of {', '.join(faulted)} failed" if faulted else ""
    unknown = sorted(j.job for j in scenario.jobs if j.current_gpus and j.current_gpus not in flops_of(scenario, j))
    note = f"The present throughput of {', '.join(unknown)} is not in the table: leaving that size counts as free"
    return explain.allocation_reason(
        allocation,
        demands,
        cause=cause,
        num_gpus=scenario.num_gpus,
        total_gpus=scenario.total_gpus,
        notes=(*notes, *((note,) if unknown else ()), *_layout_notes(scenario, allocation.gpus)),
    )


def _check_capacity(scenario: Scenario) -> None:
    twice = [job for job, times in Counter(job.job for job in scenario.jobs).items() if times > 1]
    held = sum(job.current_gpus for job in scenario.jobs)
    if twice:
        raise UserError(f"job {twice[0]}: the name is used more than once, give each job its own")
    if scenario.lost_nodes > scenario.cluster.num_nodes:
        raise UserError(f"lost_nodes is {scenario.lost_nodes}, the cluster has only num_nodes: {scenario.cluster.num_nodes}")
    if held > scenario.total_gpus:
        raise UserError(f"current_gpus add up to {held}, the cluster has only {scenario.total_gpus} GPUs")


def _check_nodes(scenario: Scenario) -> None:
    jobs = {job.job for job in scenario.jobs}
    healthy = scenario.cluster.num_nodes - scenario.lost_nodes
    for node, on_it in scenario.nodes.items():
        unknown = sorted(set(on_it) - jobs)
        if unknown:
            raise UserError(f"node {node}: there is no job {unknown[0]}, the jobs are {', '.join(sorted(jobs))}")
        used = sum(on_it.values()) if isinstance(on_it, Mapping) else 0
        if used > scenario.cluster.gpus_per_node:
            raise UserError(f"node {node}: its jobs have {used} GPUs, a node has only {scenario.cluster.gpus_per_node}")
    _check_counts(scenario)
    if len(scenario.nodes) > healthy:
        raise UserError(f"nodes names {len(scenario.nodes)} nodes, only {healthy} are healthy")


def _check_counts(scenario: Scenario) -> None:
    nodes = scenario_placement.counted(scenario.nodes)
    mixed = any(isinstance(on_it, Mapping) for on_it in scenario.nodes.values())
    if mixed and nodes is None:
        raise UserError("nodes: give either the jobs of every node, or their numbers of GPUs on every node")
    for job in scenario.jobs if nodes else ():
        told = sum(on_it.get(job.job, 0) for on_it in (nodes or {}).values())
        if told > job.current_gpus or (told < job.current_gpus and not (job.faulted or scenario.lost_nodes)):
            raise UserError(f"job {job.job}: it has {told} GPUs under nodes, but current_gpus is {job.current_gpus}")
    if scenario.max_jobs_per_node and nodes is None:
        raise UserError("max_jobs_per_node needs nodes with the number of GPUs of each job")


def _check_job(job: Job) -> None:
    at = f"job {job.job}:"
    if job.max_gpus is not None and job.min_gpus > job.max_gpus:
        raise UserError(f"{at} min_gpus {job.min_gpus} is greater than max_gpus {job.max_gpus}")
    tables = [it.throughput_flops for it in job.parallel_layouts if it.throughput_flops]
    if tables and (len(tables) < len(job.parallel_layouts) or job.model or job.throughput_flops):
        raise UserError(f"{at} give throughput_flops to all of parallel_layouts, and no model or table to the job, or to none")
    if tables:
        return
    if "throughput_flops" not in job.model_fields_set and not job.model:
        raise UserError(f"{at} the key throughput_flops is missing, and so is model, which could stand for it")
    if not job.throughput_flops and not job.model:
        raise UserError(f"{at} throughput_flops is empty, list at least one number of GPUs with its FLOP/s")
    if not job.model and job.min_gpus > max(job.throughput_flops):
        raise UserError(f"{at} min_gpus {job.min_gpus} is greater than every size in throughput_flops")
    if job.transition_s is None and job.state_from not in job.transition_s_from and job.current_gpus:
        raise UserError(f"{at} transition_s is missing, it is what moving a running job costs in seconds")


def _check_model(scenario: Scenario, job: Job) -> None:
    if job.model is None:
        return
    try:
        fits = any(size >= job.min_gpus and size % scenario.step == 0 for size in flops_of(scenario, job))
    except UserError as error:
        raise UserError(f"job {job.job}: {error}") from None
    if not fits:
        most = min(scenario.total_gpus, job.max_gpus or scenario.total_gpus)
        sizes = f"{job.min_gpus} to {most} GPUs in steps of {scenario.step}"
        raise UserError(f"job {job.job}: its model fits on none of {sizes} ({scenario.cluster.gpu}): allow it more GPUs")
