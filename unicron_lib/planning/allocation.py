"""Which job gets how many GPUs: the exact optimum of the WAF objective, with a certificate.

1. Gains become integers; options that are worth no more than a smaller one are dropped.
2. The LP relaxation gives an upper bound and a first allocation. If many options are left, a dynamic programme over
   the promising ones finds a better allocation, and options that cannot be part of anything as good are dropped.
3. A one-hot MILP (cvxpy, HiGHS) chooses among the rest.
4. A dynamic programme over the few options that may still be part of an optimum settles ties (a job that stays before
   one that moves, then fewer GPUs, then the order of names) and checks the solver; it also stands in for one that
   failed, if time allows.
Whenever the time runs out, the best allocation so far is the answer, with its certified gap.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unicron_lib.errors import InfeasibleError
from unicron_lib.planning import gains, knapsack, milp
from unicron_lib.planning.knapsack import Counts, Options
from unicron_lib.planning.waf import Demand, gain, running_s

CORE_OPTIONS = 64
"""A model of at most so many options goes to the solver as it is: 10 ms."""

CELLS_PER_S = 2e8
"""Cells of the dynamic programme that even a slow machine does in a second."""

SETTLE_S = 0.05
"""The dynamic programme may take this even if the solver used the time up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be shared: `num_gpus` healthy GPUs (n'), whose mean time between failures is `mtbf_gpu_s` each."""

    demands: tuple[Demand, ...]
    num_gpus: int
    mtbf_gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """GPUs by job, in the order of names, with gain and upper bound in FLOP.

    `gap` is the certified relative distance from the optimum. `optimal` is exact up to the rounding of the gains.
    `method` says what found it: milp, bound (the relaxation), dp or greedy. `reason` is one sentence.
    """

    gpus: dict[str, int]
    gain: float
    upper_bound: float
    gap: float
    optimal: bool
    method: str
    solve_s: float
    reason: str


class NotEnoughGpus(InfeasibleError):
    """The jobs that must run need more GPUs (`required`) than there are (`available`)."""

    def __init__(self, message: str, *, required: int, available: int) -> None:
        super().__init__(message)
        self.required = required
        self.available = available


class Solver(Protocol):
    """`milp.solve`, or a fake of it."""

    def __call__(self, tables: Sequence[Options], capacity: int, *, time_limit_s: float) -> milp.Solution:
        """Choose one option per job."""
        ...


def allocate(
    request: Request, *, timer: Callable[[], float], time_limit_s: float = 10.0, solve: Solver = milp.solve
) -> Allocation:
    """Share the GPUs. `timer` reads a monotonic clock in seconds; with `time_limit_s` 0 the solver is not asked at all.

    Raises NotEnoughGpus if the jobs that must run do not fit, UserError for figures beyond the range of floats.
    """
    started = timer()
    demands = tuple(sorted(request.demands, key=lambda demand: demand.job))
    check_feasible(demands, request.num_gpus)
    tables, unit = _tables(demands, request)
    search = _Search(tables=tables, capacity=request.num_gpus, deadline=started + time_limit_s, timer=timer, solve=solve)
    counts, upper, method, reason = search.run(ask_solver=time_limit_s > 0)
    lower = knapsack.total_gain(tables, counts)
    optimal = upper <= lower
    expected_s = running_s(request.mtbf_gpu_s, request.num_gpus)
    total = math.fsum(gain(d, count, expected_s=expected_s) for d, count in zip(demands, counts, strict=True))
    # earnings and cost of each job are off by half a unit, in the optimum and in this allocation
    bound = total if optimal else total + (upper - lower + 2 * len(demands)) * unit
    return Allocation(
        gpus={demand.job: count for demand, count in zip(demands, counts, strict=True)},
        gain=total,
        upper_bound=bound,
        gap=0.0 if optimal else (bound - total) / max(abs(bound), unit),
        optimal=optimal,
        method=method,
        solve_s=timer() - started,
        reason=reason,
    )


def check_feasible(demands: Sequence[Demand], num_gpus: int) -> None:
    """Raise NotEnoughGpus if the jobs that must run do not fit."""
    must = [demand for demand in demands if demand.must_run]
    without = [demand.job for demand in must if not demand.throughput_flops]
    required = sum(demand.min_gpus for demand in must)
    if without:
        message = f"{without[0]} must run, but there is no number of GPUs on which it can"
    elif required > num_gpus:
        needs = ", ".join(f"{demand.job} at least {demand.min_gpus}" for demand in must)
        message = f"the jobs that must run need {required} GPUs ({needs}), only {num_gpus} can be used"
    else:
        return
    raise NotEnoughGpus(message, required=required, available=num_gpus)


def _tables(demands: Sequence[Demand], request: Request) -> tuple[tuple[Options, ...], float]:
    """The undominated options of each job in integers, and the FLOP of one unit of gain."""
    num_gpus = request.num_gpus
    expected_s = running_s(request.mtbf_gpu_s, num_gpus)
    figures = (gains.largest(demand, num_gpus=num_gpus, expected_s=expected_s) for demand in demands)
    scale = gains.scale_of(figures, num_jobs=len(demands), num_gpus=num_gpus)
    tables = (gains.options(demand, num_gpus=num_gpus, expected_s=expected_s, scale=scale) for demand in demands)
    return tuple(tables), scale.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    tables: tuple[Options, ...]
    capacity: int
    deadline: float
    timer: Callable[[], float]
    solve: Solver

    def run(self, *, ask_solver: bool) -> tuple[Counts, int, str, str]:
        """The best allocation found, an upper bound of the gain, the method, and a sentence on how good it is."""
        if not self.tables:
            return (), 0, "bound", "there is no job to place"
        relaxation = knapsack.relax(self.tables, self.capacity)
        upper = math.floor(relaxation.upper + knapsack.ROUNDING)
        counts, method, status = relaxation.counts, "greedy", "no time was given to the solver"
        if ask_solver:
            counts, method, status = self._improve(relaxation)
        core = knapsack.contenders(self.tables, relaxation, knapsack.total_gain(self.tables, counts))
        if ask_solver and self._can_afford(core):
            settled = knapsack.best(core, self.capacity)
            agreed = method in {"milp", "bound"} and self._gain(settled) == self._gain(counts)
            method = method if agreed else "dp"
            return settled, self._gain(settled), method, _certified(method, status)
        if method == "milp" or self._gain(counts) == upper:
            return counts, self._gain(counts), method, "the optimum, as certified by the bound"
        return counts, upper, method, f"the best that was found in the time given ({status})"

    def _improve(self, relaxation: knapsack.Relaxation) -> tuple[Counts, str, str]:
        counts, core = relaxation.counts, self.tables
        if _num_options(core) > CORE_OPTIONS:
            few = knapsack.promising(self.tables, relaxation, CORE_OPTIONS)
            if self._can_afford(few):
                counts = max(counts, knapsack.best(few, self.capacity), key=self._gain)
            core = knapsack.contenders(self.tables, relaxation, self._gain(counts))
        if all(len(table) == 1 for table in core):
            return counts, "bound", "only one allocation reaches the bound"
        left_s = self.deadline - self.timer()
        if left_s <= 0:
            return counts, "greedy", "the time was up before the solver began"
        solution = self.solve(core, self.capacity, time_limit_s=left_s)
        found = solution.counts is not None and self._gain(solution.counts) >= self._gain(counts)
        if solution.counts is None or not found:
            return counts, "greedy", f"the solver found nothing better: {solution.status}"
        return solution.counts, "milp" if solution.proved else "greedy", f"the solver ended with {solution.status}"

    def _gain(self, counts: Counts) -> int:
        return knapsack.total_gain(self.tables, counts)

    def _can_afford(self, core: Sequence[Options]) -> bool:
        left_s = max(self.deadline - self.timer(), SETTLE_S)
        return knapsack.num_cells(core, self.capacity) <= CELLS_PER_S * left_s


def _num_options(tables: Sequence[Options]) -> int:
    return sum(len(table) for table in tables)


def _certified(method: str, status: str) -> str:
    match method:
        case "milp":
            return "the optimum, as the solver and the dynamic programme agree"
        case "bound":
            return f"the optimum: {status}"
        case _:
            return f"the optimum, found by the dynamic programme ({status})"
