"""How fast the planner is, and whether it is right, on random clusters of the sizes that matter."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot
from unicron_lib.planning import gains, instances, knapsack, milp, placement, plan_table, pools, rebalancing
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.waf import running_s

P = ParamSpec("P")
T = TypeVar("T")

NUM_SEEDS = 7
NUM_REPEATS = 3
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds of one call: on the clock, and of the processor (of this process and of children that have ended)."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement: `median_s` and `worst_s` in seconds, held against `bar_s`.

    `cpu_s` is the median of the processor's time: less than `median_s` where others use the machine, too.
    `ratio` says how many times as long `against` took, measured beside it on the same clusters. `is_right` is false if
    an answer differs from the dynamic programme's, or a fresh solve's; `gap` is the largest certified gap.
    """

    what: str
    median_s: float
    worst_s: float
    cpu_s: float
    bar_s: float
    ratio: float | None = None
    against: str = ""
    gap: float = 0.0
    is_right: bool = True

    @property
    def ok(self) -> bool:
        """Whether the bar was held, with right answers that are certified to be the optimum."""
        return self.median_s <= self.bar_s and self.is_right and self.gap == 0.0


def by_dynamic_programme(request: Request) -> dict[str, int]:
    """The optimum over all options, without bounds, presolve or solver. The jobs that must run have to fit."""
    demands = sorted(request.demands, key=lambda demand: demand.job)
    num_gpus, expected_s = request.num_gpus, running_s(request.mtbf_gpu_s, request.num_gpus)
    figures = [gains.largest(demand, num_gpus=num_gpus, expected_s=expected_s) for demand in demands]
    scale = gains.scale_of(figures, num_jobs=len(demands), num_gpus=num_gpus)
    tables = [gains.options(demand, num_gpus=num_gpus, expected_s=expected_s, scale=scale) for demand in demands]
    return {demand.job: count for demand, count in zip(demands, knapsack.best(tables, num_gpus), strict=True)}


def allocations(*, num_jobs: int, num_gpus: int, step: int = 1, largest: int | None = None, bar_s: float) -> Figure:
    """Solve clusters of one size afresh, beside the dynamic programme over all options."""
    milp.warm_up()
    own: list[Took] = []
    reference: list[Took] = []
    gap, is_right = 0.0, True
    for seed in range(NUM_SEEDS):
        request = instances.cluster(num_jobs=num_jobs, num_gpus=num_gpus, seed=seed, step=step, largest=largest)
        found, took = _timed(NUM_REPEATS, solve, request)
        expected, slow = _timed(1, by_dynamic_programme, request)
        own += took
        reference += slow
        gap = max(gap, found.gap)
        is_right = is_right and found.gpus == expected
    return _figure(
        f"{num_jobs} jobs on {num_gpus} GPUs" + (f" in steps of {step}" if step > 1 else ""),
        own,
        bar_s=bar_s,
        reference=reference,
        against="the dynamic programme over all options",
        gap=gap,
        is_right=is_right,
    )


def tables(*, num_jobs: int, num_gpus: int, largest: int, bar_s: float, lookup_bar_s: float) -> tuple[Figure, Figure]:
    """Build whole plan tables, beside solving each of their changes afresh; then look changes up."""
    building, looking, fresh = list[Took](), list[Took](), list[Took]()
    num_changes, is_right = 0, True
    for seed in range(2):
        request = instances.cluster(
            num_jobs=num_jobs, num_gpus=num_gpus, seed=seed, largest=largest, current=num_gpus // num_jobs
        )
        changes = plan_table.one_step(request, node_gpus=1)
        table, took = _timed(2, plan_table.build, request, changes, timer=time.perf_counter)
        building += took
        num_changes = max(num_changes, len(changes))
        for change in changes[:: max(1, len(changes) // 12)]:
            found, took = _timed(NUM_REPEATS, table.lookup, change)
            looking += took
            solved, took = _timed(1, solve, plan_table.after(request, change))
            fresh += took
            is_right = is_right and found is not None and found.gpus == solved.gpus
    online_s = num_changes * statistics.median(each.wall_s for each in fresh)
    name = f"{num_jobs} jobs on {num_gpus} GPUs"
    whole = _figure(
        f"plan table, {name}, {num_changes} changes",
        building,
        bar_s=bar_s,
        reference=[Took(wall_s=online_s, cpu_s=online_s)],
        against="solving each change afresh",
        is_right=is_right,
    )
    one = _figure("look-up in it", looking, bar_s=lookup_bar_s, reference=fresh, against="a fresh solve", is_right=is_right)
    return whole, one


def placements(*, num_jobs: int, num_nodes: int, nodes_per_rack: int = 0, bar_s: float) -> Figure:
    """Place new allocations after the loss of a node; with racks, also where the solver has to find the fewest.

    Right if all GPUs are distinct, healthy and as many as wanted, and if what moves is certified to be the least.
    """
    milp.warm_up()
    num_gpus = num_nodes * GPUS_PER_NODE
    racks = [f"rack-{n // nodes_per_rack}" if nodes_per_rack else "" for n in range(num_nodes)]
    nodes = [Node(id=f"node-{n:03}", boot="0", address="", num_gpus=GPUS_PER_NODE, rack=rack) for n, rack in enumerate(racks)]
    took: list[Took] = []
    is_right = True
    for seed in range(NUM_SEEDS):
        request = instances.cluster(num_jobs=num_jobs, num_gpus=num_gpus, seed=seed)
        unknown = [replace(node, rack="") for node in nodes]
        held = placement.place({demand.job: demand.current_gpus for demand in request.demands}, {}, unknown)
        left = nodes[:seed] + nodes[seed + 1 :]
        wanted = solve(replace(request, num_gpus=num_gpus - GPUS_PER_NODE)).gpus
        placed, spent = _timed(NUM_REPEATS, placement.arrange, wanted, held, left)
        took += spent
        is_right = is_right and placed.certified and _fits(placed.slots, wanted, left)
    beside = f" in racks of {nodes_per_rack}" if nodes_per_rack else ""
    return _figure(
        f"placement of {num_jobs} jobs on {num_nodes} nodes of {GPUS_PER_NODE}{beside}", took, bar_s=bar_s, is_right=is_right
    )


def between_pools(*, num_jobs: int, num_gpus: int, num_pools: int, bar_s: float, moving_bar_s: float) -> tuple[Figure, Figure]:
    """Recover within pools, and move between them. The bars are ours: milliseconds, and seconds in the background.

    Right if nothing exceeds the pools or the budget.
    """
    staying, moving = list[Took](), list[Took]()
    is_right, gap = True, 0.0
    for seed in range(NUM_SEEDS):
        asked = instances.market(num_jobs=num_jobs, num_gpus=num_gpus, num_pools=num_pools, seed=seed)
        pinned, took = _timed(NUM_REPEATS, pools.recover, asked, timer=time.perf_counter)
        staying += took
        free, took = _timed(1, rebalancing.rebalance, asked, timer=time.perf_counter, time_limit_s=moving_bar_s)
        moving += took
        gap = max(gap, free.gap)
        is_right = is_right and not any(pools.excess(asked, plan.gpus, plan.pool) for plan in (pinned, free))
    name = f"{num_jobs} jobs in {num_pools} pools of {num_gpus} GPUs with a budget"
    told = f"rebalancing of {name}, gap at most {gap:.1e}"
    return (
        _figure(f"recovery of {name}", staying, bar_s=bar_s, is_right=is_right),
        _figure(told, moving, bar_s=moving_bar_s, is_right=is_right),
    )


def _fits(placed: Mapping[str, Sequence[Slot]], wanted: Mapping[str, int], nodes: Sequence[Node]) -> bool:
    used = [slot for slots in placed.values() for slot in slots]
    offered = {slot for node in nodes for slot in node.slots}
    return {job: len(slots) for job, slots in placed.items()} == wanted and len(used) == len(set(used) & offered)


def solve(request: Request) -> Allocation:
    """A fresh solve with the solver's usual time."""
    return allocate(request, timer=time.perf_counter)


COLD = """
from unicron_lib.cli import planner_figures
from unicron_lib.planning import instances
found = planner_figures.solve(instances.cluster(num_jobs=16, num_gpus=128, seed=0))
print("solved" if found.optimal and found.method == "milp" else found)
"""


def cold_process(*, bar_s: float) -> Figure:
    """A new Python process, from its start to its first plan by the solver (16 jobs on 128 GPUs) and its end."""

    def first_plan() -> str:
        return subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=False).stdout.strip()

    said, took = _timed(NUM_REPEATS, first_plan)
    return _figure("first plan of a cold process", took, bar_s=bar_s, is_right=said == "solved")


def _timed(repeats: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, list[Took]]:
    """What `call` gave the last time, and how long each of its calls took."""
    took: list[Took] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), _cpu_s()
        found = call(*args, **kwargs)
        took.append(Took(wall_s=time.perf_counter() - wall, cpu_s=_cpu_s() - cpu))
    return found, took


def _cpu_s() -> float:
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def _figure(
    what: str,
    took: Sequence[Took],
    *,
    bar_s: float,
    reference: Sequence[Took] = (),
    against: str = "",
    gap: float = 0.0,
    is_right: bool,
) -> Figure:
    median = statistics.median(each.wall_s for each in took)
    ratio = statistics.median(each.wall_s for each in reference) / max(median, 1e-9) if reference else None
    return Figure(
        what=what,
        median_s=median,
        worst_s=max(each.wall_s for each in took),
        cpu_s=statistics.median(each.cpu_s for each in took),
        bar_s=bar_s,
        ratio=ratio,
        against=against,
        gap=gap,
        is_right=is_right,
    )
