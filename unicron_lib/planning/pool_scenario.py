"""The scenario file of `unicron plan` with `pools` in the place of `cluster`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unicron_lib.errors import UserError
from unicron_lib.planning import pools, rebalancing, scenario_text
from unicron_lib.planning.pools import Market, Offer, Pool, PoolPlan
from unicron_lib.planning.scenario import NotNegative, Positive
from unicron_lib.planning.waf import Demand

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolKeys(_Keys):
    """A pool before its loss; spot instances are a pool of their own, with their price and their `mtbf_gpu_s`."""

    num_nodes: Annotated[int, Field(ge=1, le=100_000)]
    gpus_per_node: Annotated[int, Field(ge=1, le=1_000)]
    mtbf_gpu_s: Positive
    dollars_per_gpu_h: NotNegative = 0.0
    lost_nodes: Count = 0


class PoolJob(_Keys):
    """A job; `throughput_flops` maps pools to FLOP/s by number of GPUs, `pool` is where it is."""

    job: Name
    throughput_flops: Annotated[Mapping[Name, Annotated[Mapping[Size, NotNegative], Field(min_length=1)]], Field(min_length=1)]
    pool: str = ""
    tenant: str = ""
    weight: Positive = 1.0
    current_gpus: Count = 0
    faulted: bool = False
    min_gpus: Size = 1
    max_gpus: Size | None = None
    must_run: bool = False
    transition_s: NotNegative | None = None


class PoolScenario(_Keys):
    """Pools, their jobs and the limits. With `rebalance` jobs may move between pools; without, as in a recovery, not."""

    pools: Annotated[Mapping[Name, PoolKeys], Field(min_length=1)]
    jobs: Annotated[tuple[PoolJob, ...], Field(min_length=1)]
    budget_dollars_per_h: NotNegative | None = None
    quotas_gpus: Mapping[Name, Count] = Field(default_factory=dict)
    rebalance: bool = True
    time_limit_s: NotNegative = 10.0


def parse(document: Mapping[Any, Any]) -> PoolScenario:
    """Check a scenario. Raises UserError with one sentence that names the job and the key."""
    try:
        scenario = PoolScenario.model_validate(document)
    except ValidationError as error:
        raise UserError(scenario_text.sentence(error, document)) from None
    for name, pool in scenario.pools.items():
        if pool.lost_nodes > pool.num_nodes:
            raise UserError(f"pool {name}: lost_nodes is {pool.lost_nodes}, it has only num_nodes: {pool.num_nodes}")
    twice = [job for job, times in Counter(job.job for job in scenario.jobs).items() if times > 1]
    if twice:
        raise UserError(f"job {twice[0]}: the name is used more than once, give each job its own")
    for job in scenario.jobs:
        _check_job(scenario, job)
    _check_capacity(scenario)
    return scenario


def changed(document: Mapping[Any, Any], *, lose: Sequence[str] = (), finish: Sequence[str] = ()) -> PoolScenario:
    """The scenario after each pool of `lose` has lost a node that no job was on, and the jobs `finish` have ended."""
    before = parse(document)
    made = {name: dict(pool) for name, pool in document["pools"].items()}
    for name in lose:
        if name not in made:
            raise UserError(f"the scenario has no pool {name}: its pools are {', '.join(made)}")
        made[name]["lost_nodes"] = made[name].get("lost_nodes", 0) + 1
    jobs = [job.job for job in before.jobs]
    unknown = [job for job in finish if job not in jobs]
    if unknown:
        raise UserError(f"the scenario has no job {unknown[0]}: its jobs are {', '.join(sorted(jobs))}")
    left = [job for job in document["jobs"] if job["job"] not in finish]
    tenants = {job.get("tenant") for job in left}
    quotas = {tenant: quota for tenant, quota in before.quotas_gpus.items() if tenant in tenants}
    return parse({**document, "pools": made, "jobs": left, "quotas_gpus": quotas})


def market_of(scenario: PoolScenario) -> Market:
    """The scenario as the planner sees it."""
    made = tuple(
        Pool(
            name=name,
            num_gpus=(pool.num_nodes - pool.lost_nodes) * pool.gpus_per_node,
            mtbf_gpu_s=pool.mtbf_gpu_s,
            dollars_per_gpu_h=pool.dollars_per_gpu_h,
        )
        for name, pool in scenario.pools.items()
    )
    budget = scenario.budget_dollars_per_h
    return Market(
        pools=made,
        offers=tuple(_offer(job) for job in scenario.jobs),
        budget_dollars_per_h=float("inf") if budget is None else budget,
        quotas_gpus=scenario.quotas_gpus,
    )


def answer(scenario: PoolScenario, *, timer: Callable[[], float]) -> dict[str, Any]:
    """The object that `unicron plan --json` prints. Raises InfeasibleError if the jobs that must run do not fit."""
    market = market_of(scenario)
    if scenario.rebalance:
        plan = rebalancing.rebalance(market, timer=timer, time_limit_s=scenario.time_limit_s)
    else:
        plan = pools.recover(market, timer=timer)
    return {
        "gpus": dict(plan.gpus),
        "pool": dict(plan.pool),
        "layout": {job: {"tp": 1, "pp": 1, "dp": count} for job, count in plan.gpus.items() if count},
        "dollars_per_h": plan.dollars_per_h,
        "gain": plan.gain,
        "upper_bound": plan.upper_bound,
        "gap": plan.gap,
        "optimal": plan.optimal,
        "method": plan.method,
        "solve_s": plan.solve_s,
        "reason": _reason(scenario, market, plan),
    }


def _offer(job: PoolJob) -> Offer:
    tables = {
        pool: {size: flops for size, flops in table.items() if job.min_gpus <= size <= (job.max_gpus or size)}
        for pool, table in job.throughput_flops.items()
    }
    demand = Demand(
        job=job.job,
        throughput_flops=tables.pop(job.pool, {}),
        weight=job.weight,
        current_gpus=job.current_gpus,
        current_flops=job.throughput_flops.get(job.pool, {}).get(job.current_gpus, 0.0),
        faulted=job.faulted,
        must_run=job.must_run,
        transition_s=job.transition_s or 0.0,
    )
    return Offer(demand=demand, pool=job.pool, tenant=job.tenant, elsewhere=tables)


def _reason(scenario: PoolScenario, market: Market, plan: PoolPlan) -> str:
    """What each job gets and where, what that costs, and how sure it is."""
    losses = [f"{pool.lost_nodes} of {name}" for name, pool in scenario.pools.items() if pool.lost_nodes]
    moves = [_move(job, plan) for job in sorted(scenario.jobs, key=lambda job: job.job)]
    held = {job.job: job.current_gpus for job in scenario.jobs}
    before = pools.dollars_per_h(market, held, {job.job: job.pool for job in scenario.jobs})
    limit = scenario.budget_dollars_per_h
    within = f" of a budget of {limit:g}" if limit is not None else ""
    certain = "This is the optimum" if plan.optimal else f"At most {plan.gap:.2%} more could be gained"
    kept = "" if scenario.rebalance else "Every job stays in its pool: `rebalance: true` looks at all of them"
    found = (
        f"Lost nodes: {', '.join(losses)}" if losses else "No node is lost",
        f"GPUs: {', '.join(moves)}",
        f"Dollars an hour: {before:.2f} -> {plan.dollars_per_h:.2f}{within}",
        *plan.notes,
        kept,
        certain,
    )
    return " ".join(f"{part}." for part in found if part)


def _move(job: PoolJob, plan: PoolPlan) -> str:
    before = f"{job.current_gpus}{f' in {job.pool}' if job.current_gpus else ''}"
    there, count = plan.pool.get(job.job), plan.gpus[job.job]
    return f"{job.job} {before} -> {count}{f' in {there}' if count and there != job.pool else ''}"


def _check_job(scenario: PoolScenario, job: PoolJob) -> None:
    known = f"the pools are {', '.join(scenario.pools)}"
    named = [job.pool] if job.pool else []
    unknown = [pool for pool in (*named, *job.throughput_flops) if pool not in scenario.pools]
    if unknown:
        raise UserError(f"job {job.job}: there is no pool {unknown[0]}, {known}")
    if job.current_gpus and not job.pool:
        raise UserError(f"job {job.job}: it has current_gpus, but the key pool does not say where: {known}")
    if job.max_gpus is not None and job.min_gpus > job.max_gpus:
        raise UserError(f"job {job.job}: min_gpus {job.min_gpus} is greater than max_gpus {job.max_gpus}")
    if job.min_gpus > max(size for table in job.throughput_flops.values() for size in table):
        raise UserError(f"job {job.job}: min_gpus {job.min_gpus} is greater than every size in throughput_flops")
    if job.transition_s is None and job.current_gpus:
        raise UserError(f"job {job.job}: transition_s is missing, it is what moving a running job costs in seconds")


def _check_capacity(scenario: PoolScenario) -> None:
    for name, pool in scenario.pools.items():
        held = sum(job.current_gpus for job in scenario.jobs if job.pool == name)
        if held > pool.num_nodes * pool.gpus_per_node:
            total = pool.num_nodes * pool.gpus_per_node
            raise UserError(f"pool {name}: current_gpus add up to {held}, it has only {total} GPUs")
    tenants = {job.tenant for job in scenario.jobs}
    strangers = sorted(set(scenario.quotas_gpus) - tenants)
    if strangers:
        known = ", ".join(sorted(tenants - {""})) or "none"
        raise UserError(f"quotas_gpus names {strangers[0]}, which is the tenant of no job: the tenants are {known}")
