"""The plan table: what to do after each event that may come next, computed before it comes, looked up in O(1).

All changes that leave the same number of GPUs share their gain tables and one price of a GPU. Any price gives a bound
on what a change can still gain; a dynamic programme over the options that lose little at that price gives an
allocation. Once bound and allocation are closer than the options that were left out, the allocation is the very one
that a fresh solve finds, ties included. What cannot be settled so is solved afresh.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unicron_lib.errors import UserError
from unicron_lib.planning import gains, knapsack
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate, check_feasible
from unicron_lib.planning.gains import Scale
from unicron_lib.planning.knapsack import Counts, Options
from unicron_lib.planning.waf import Demand, gain, running_s

METHOD = "table"
"""The method of an allocation that the table computed itself; others name what solved them afresh."""

NUM_PROMISING = 256
"""The first try looks at about so many options of all jobs."""

MOST_CELLS = 2e7
"""Cells of the dynamic programme (0.1 s) beyond which a fresh solve, which may ask the solver, is the better way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What may come next: `gpus` more or fewer healthy GPUs, jobs that are hit, one that ends, one that begins.

    Two events with the same effect are the same change: a node lost with job a on it, whichever node it is.
    """

    gpus: int = 0
    faulted: frozenset[str] = frozenset()
    finished: str | None = None
    launched: str | None = None


def one_step(
    request: Request, *, node_gpus: int, residents: Iterable[frozenset[str]] = (), queued: Iterable[Demand] = ()
) -> tuple[Change, ...]:
    """Every change that one event can bring, each once.

    A worker of each running job fails, or its GPU is lost; a node is lost, with no job, any single one or one of the
    sets `residents` on it; a node joins; each job ends; each job of `queued` begins.
    """
    running = [demand.job for demand in request.demands if demand.current_gpus]
    hit = [frozenset({job}) for job in running]
    found = [Change(faulted=jobs) for jobs in hit]
    found += [Change(gpus=-1, faulted=jobs) for jobs in hit]
    found += [Change(gpus=-node_gpus, faulted=jobs) for jobs in (frozenset[str](), *hit, *residents)]
    found += [Change(gpus=node_gpus)]
    found += [Change(finished=demand.job) for demand in request.demands]
    found += [Change(launched=demand.job) for demand in queued]
    return tuple(change for change in dict.fromkeys(found) if request.num_gpus + change.gpus >= 0)


def after(request: Request, change: Change, queued: Iterable[Demand] = ()) -> Request:
    """The request that a fresh solve would get after `change`. Raises UserError if it names a job that is not there."""
    demands = {demand.job: demand for demand in request.demands}
    waiting = {demand.job: demand for demand in queued}
    for job in (*change.faulted, *([change.finished] if change.finished is not None else [])):
        if job not in demands:
            raise UserError(f"{job} is none of the jobs: {', '.join(sorted(demands)) or 'there are none'}")
    for job in change.faulted:
        demands[job] = replace(demands[job], faulted=True)
    demands.pop(change.finished or "", None)
    if change.launched is not None:
        if change.launched not in waiting:
            raise UserError(f"{change.launched} is none of the queued jobs: {', '.join(sorted(waiting)) or 'there are none'}")
        demands[change.launched] = waiting[change.launched]
    num_gpus = request.num_gpus + change.gpus
    if num_gpus < 0:
        raise UserError(f"{-change.gpus} GPUs cannot be lost, there are only {request.num_gpus}")
    return replace(request, demands=tuple(demands.values()), num_gpus=num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Allocations by change. `infeasible` are the changes after which the jobs that must run do not fit any more."""

    request: Request
    queued: tuple[Demand, ...]
    plans: Mapping[Change, Allocation]
    infeasible: frozenset[Change]
    build_s: float

    def lookup(self, change: Change) -> Allocation | None:
        """The allocation after `change`, None if the table does not hold it."""
        return self.plans.get(change)

    def answer(self, change: Change, *, timer: Callable[[], float], time_limit_s: float = 10.0) -> Allocation:
        """From the table, else solved now. Raises NotEnoughGpus as `allocate` does."""
        found = self.lookup(change)
        return found or allocate(after(self.request, change, self.queued), timer=timer, time_limit_s=time_limit_s)


def build(
    request: Request,
    changes: Iterable[Change],
    *,
    queued: Sequence[Demand] = (),
    timer: Callable[[], float],
    time_limit_s: float = 10.0,
) -> PlanTable:
    """Solve all `changes`. Each fresh solve among them may take `time_limit_s`; what it cannot prove is left out."""
    started = timer()
    by_size: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes:
        by_size[request.num_gpus + change.gpus].append(change)
    plans: dict[Change, Allocation] = {}
    infeasible: set[Change] = set()
    for num_gpus, alike in by_size.items():
        family = _family(replace(request, num_gpus=num_gpus))
        for change in alike:
            asked = after(request, change, queued)
            try:
                settled = family.settle(asked, timer) if family else None
                found = settled or allocate(asked, timer=timer, time_limit_s=time_limit_s)
            except NotEnoughGpus:
                infeasible.add(change)
            else:
                plans.update({change: found} if found.optimal else {})
    return PlanTable(
        request=request, queued=tuple(queued), plans=plans, infeasible=frozenset(infeasible), build_s=timer() - started
    )


Key = tuple[object, ...]


def key_of(request: Request) -> Key:
    """Equal for requests that have the same answer."""
    return request.num_gpus, request.mtbf_gpu_s, *(_key_of_demand(demand) for demand in request.demands)


def _key_of_demand(demand: Demand) -> Key:
    figures = (demand.weight, demand.current_gpus, demand.current_flops, demand.transition_s)
    tables = (tuple(demand.throughput_flops.items()), tuple(demand.relayout_s.items()))
    return demand.job, *figures, demand.faulted, demand.must_run, *tables


class Families:
    """Solves one request after the other; those with as many GPUs, equally reliable, share what they have in common."""

    def __init__(self, fresh: Callable[[Request], Allocation], *, timer: Callable[[], float]) -> None:
        self._fresh = fresh
        self._timer = timer
        self._known: dict[Key, _Family | None] = {}
        self._demands: dict[Key, Demand] = {}

    def solve(self, request: Request) -> Allocation:
        """What a fresh solve answers. Raises NotEnoughGpus as `allocate` does."""
        same = tuple(self._demands.setdefault(_key_of_demand(demand), demand) for demand in request.demands)
        asked, size = replace(request, demands=same), (request.num_gpus, request.mtbf_gpu_s)
        if size not in self._known:
            self._known[size] = _family(asked)
        family = self._known[size]
        return (family and family.settle(asked, self._timer)) or self._fresh(request)


def _family(request: Request) -> "_Family | None":
    """None if there is nothing that its members could share."""
    try:
        return _Family(request) if request.demands else None
    except NotEnoughGpus:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A job's options, what each loses at the family's price, what the best is worth there, and those that lose little."""

    options: Options
    losses: knapsack.Floats
    best: float
    few: Options

    def within(self, slack: float) -> Options:
        return self.options.where(self.losses <= slack)


class _Family:
    """Requests with the same number of GPUs, which differ in a few jobs from `request`.

    Raises NotEnoughGpus if its jobs that must run do not fit.
    """

    def __init__(self, request: Request) -> None:
        check_feasible(request.demands, request.num_gpus)
        self._capacity = request.num_gpus
        self._expected_s = running_s(request.mtbf_gpu_s, request.num_gpus)
        self._demands = sorted(request.demands, key=lambda demand: demand.job)
        # by id, since the jobs that do not change are the same objects in all requests; `_demands` keeps them alive
        self._figures = {id(demand): self._largest(demand) for demand in self._demands}
        # ties of one job more than there are: one may be launched
        self._scale = replace(self._scale_of(self._demands), ties=(len(self._demands) + 2) * (request.num_gpus + 1))
        tables = [self._options(demand) for demand in self._demands]
        self._price = knapsack.relax(tables, request.num_gpus).price
        lost = np.concatenate([knapsack.losses(table, self._price) for table in tables])
        self._limit = float(np.partition(lost, NUM_PROMISING)[NUM_PROMISING]) if len(lost) > NUM_PROMISING else math.inf
        self._known = {id(demand): self._priced(table) for demand, table in zip(self._demands, tables, strict=True)}

    def settle(self, asked: Request, timer: Callable[[], float]) -> Allocation | None:
        """The optimum, None if it has to be solved afresh: its figures round differently, or too much is undecided.

        Raises NotEnoughGpus if the jobs that must run do not fit.
        """
        started = timer()
        demands = sorted(asked.demands, key=lambda demand: demand.job)
        check_feasible(demands, self._capacity)
        if self._scale_of(demands).unit != self._scale.unit:
            return None
        jobs = [self._known.get(id(demand)) or self._priced(self._options(demand)) for demand in demands]
        counts = self._optimum(jobs)
        if counts is None:
            return None
        total = math.fsum(gain(d, n, expected_s=self._expected_s) for d, n in zip(demands, counts, strict=True))
        return Allocation(
            gpus={demand.job: count for demand, count in zip(demands, counts, strict=True)},
            gain=total,
            upper_bound=total,
            gap=0.0,
            optimal=True,
            method=METHOD,
            solve_s=timer() - started,
            reason="the optimum, computed in advance and certified by the bound",
        )

    def _optimum(self, jobs: Sequence[_Priced]) -> Counts | None:
        upper = self._price * self._capacity + math.fsum(job.best for job in jobs)
        first = _best([job.few for job in jobs], self._capacity)
        if first is None:
            return None
        counts, lower = first
        slack = upper - lower + knapsack.ROUNDING
        if slack <= self._limit:
            return counts
        second = _best([job.within(slack) for job in jobs], self._capacity)
        return second and second[0]

    def _priced(self, table: Options) -> _Priced:
        lost = knapsack.losses(table, self._price)
        best = float((table.gains - self._price * table.counts).max())
        return _Priced(options=table, losses=lost, best=best, few=table.where(lost <= self._limit))

    def _options(self, demand: Demand) -> Options:
        return gains.options(demand, num_gpus=self._capacity, expected_s=self._expected_s, scale=self._scale)

    def _largest(self, demand: Demand) -> float:
        return gains.largest(demand, num_gpus=self._capacity, expected_s=self._expected_s)

    def _scale_of(self, demands: Sequence[Demand]) -> Scale:
        figures = (self._figures.get(id(d)) or self._largest(d) for d in demands)
        return gains.scale_of(figures, num_jobs=len(demands), num_gpus=self._capacity)


def _best(core: Sequence[Options], capacity: int) -> tuple[Counts, int] | None:
    """`knapsack.best` and its gain, with the jobs that have but one option left set aside.

    None if it does not fit or would take too long.
    """
    counts = [int(table.counts[0]) for table in core]
    total = sum(int(table.gains[0]) for table in core)
    left = capacity - sum(counts)
    if left < 0:
        return None
    open_jobs = [index for index, table in enumerate(core) if len(table) > 1]
    if open_jobs:
        tables = [core[index] for index in open_jobs]
        room = left + sum(counts[index] for index in open_jobs)
        if knapsack.num_cells(tables, room) > MOST_CELLS:
            return None
        for index, count in zip(open_jobs, knapsack.best(tables, room), strict=True):
            counts[index] = count
            total += core[index].gain_of(count) - int(core[index].gains[0])
    return tuple(counts), total
