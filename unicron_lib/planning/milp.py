"""The one module that calls the solver: models in cvxpy, solved by HiGHS.

cvxpy and HiGHS answer some bad inputs with other exceptions than they document, and some time-outs with an invalid
solution that looks like a valid one. Here all of that becomes a `Solution`, and a solution that is handed out has
been checked in integers. cvxpy takes 1.5 s to import: it happens on first use.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unicron_lib.planning.knapsack import Counts, Floats, Integers, Options

LARGEST_COEFFICIENT = 1e6
"""HiGHS goes wrong with raw FLOP (1e22), and with 1e6 still tells values apart that differ by 1e-9 of the largest."""

INFEASIBLE = "infeasible"
"""The status of a `Program` that nothing satisfies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver said: `counts` is None if it found nothing; `proved` if they are the optimum."""

    counts: Counts | None
    proved: bool
    status: str


def solve(tables: Sequence[Options], capacity: int, *, time_limit_s: float) -> Solution:
    """Choose one option per job with the greatest sum of gains and at most `capacity` GPUs. Raises nothing."""
    import cvxpy as cp

    _swallow_banner()
    try:
        problem, chosen, unit = _model(cp, tables, capacity)
        problem.solve(solver=cp.HIGHS, **_settings(time_limit_s, unit))
    except (cp.error.SolverError, ValueError) as error:
        # cvxpy reports an unknown status of HiGHS as ValueError "Cannot unpack invalid solution"
        return Solution(counts=None, proved=False, status=f"{type(error).__name__}: {error}")
    status = str(problem.status)
    if status not in {cp.OPTIMAL, cp.OPTIMAL_INACCURATE, cp.USER_LIMIT} or chosen.value is None:
        return Solution(counts=None, proved=False, status=status)
    counts = _counts(tables, capacity, chosen.value)
    return Solution(counts=counts, proved=status == cp.OPTIMAL and counts is not None, status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Minimise `cost` x subject to `at_least` <= x <= `at_most` and rows x <= (or, where `exact`, ==) `limits`, in integers.

    `entries` are the coefficients of the rows that are not 0: row, column, value.
    """

    cost: Integers
    at_least: Integers
    at_most: Integers
    entries: Integers
    limits: Integers
    exact: NDArray[np.bool_]

    def holds(self, values: Integers) -> bool:
        """Whether `values` keep to all bounds and rows."""
        rows = np.zeros(len(self.limits), dtype=np.int64)
        np.add.at(rows, self.entries[:, 0], self.entries[:, 2] * values[self.entries[:, 1]])
        bounded = bool(((self.at_least <= values) & (values <= self.at_most)).all())
        return bounded and bool(np.where(self.exact, rows == self.limits, rows <= self.limits).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver said of a `Program`: `values` is None if it found nothing; `proved` if they are the optimum."""

    values: Integers | None
    proved: bool
    status: str


def minimise(program: Program, *, time_limit_s: float) -> Answer:
    """Solve a general program in integers. Raises nothing."""
    nothing = np.zeros(0, dtype=np.int64)
    if not len(program.cost):  # which cvxpy refuses
        possible = program.holds(nothing)
        return Answer(values=nothing if possible else None, proved=possible, status="optimal" if possible else INFEASIBLE)
    import cvxpy as cp
    from scipy.sparse import csr_array

    _swallow_banner()
    row, column, value = program.entries.T
    matrix = csr_array((value.astype(float), (row, column)), shape=(len(program.limits), len(program.cost)))
    unit = min(1.0, LARGEST_COEFFICIENT / max(1, int(np.abs(program.cost).max(initial=0))))
    try:
        x = cp.Variable(len(program.cost), integer=True)
        bounds = [x >= program.at_least, x <= program.at_most]
        rows = [(matrix[program.exact] @ x == program.limits[program.exact])] if program.exact.any() else []
        rows += [matrix[~program.exact] @ x <= program.limits[~program.exact]] if not program.exact.all() else []
        problem = cp.Problem(cp.Minimize((program.cost * unit) @ x), bounds + rows)
        problem.solve(solver=cp.HIGHS, **_settings(time_limit_s, unit))
    except (cp.error.SolverError, ValueError) as error:
        return Answer(values=None, proved=False, status=f"{type(error).__name__}: {error}")
    # all is bounded
    status = str(problem.status).replace("infeasible_or_unbounded", INFEASIBLE)
    if status not in {cp.OPTIMAL, cp.OPTIMAL_INACCURATE, cp.USER_LIMIT} or x.value is None:
        return Answer(values=None, proved=False, status=status)
    values = np.rint(np.asarray(x.value)).astype(np.int64)
    found = program.holds(values)
    return Answer(values=values if found else None, proved=found and status == cp.OPTIMAL, status=status)


def warm_up() -> None:
    """Import cvxpy and solve once, so that the next plan takes milliseconds."""
    column = np.arange(2, dtype=np.int64)
    solve((Options(counts=column, gains=column, values=column),), 1, time_limit_s=5.0)


@functools.cache
def _swallow_banner() -> None:
    """Let HiGHS's greeting go nowhere: its first instance prints it on stdout, whatever the options of the solve say."""
    import highspy

    # the base class is bare of the callbacks, whose set-up prints before an option can be set
    silent = highspy.Highs.__base__()
    silent.setOptionValue("log_to_console", False)
    silent.addVar(0.0, 1.0)


def _model(cp: Any, tables: Sequence[Options], capacity: int) -> tuple[Any, Any, float]:
    """The problem, its variable, and how much one unit of gain is in its objective."""
    sizes = [len(table) for table in tables]
    owners = np.repeat(np.arange(len(tables)), sizes)
    # shifted to each job's smallest option: smaller numbers, and no job's constant drowns another's differences
    gains = np.concatenate([table.gains - table.gains[0] for table in tables])
    extra = np.concatenate([table.counts - table.counts[0] for table in tables])
    left = capacity - sum(int(table.counts[0]) for table in tables)
    scale = min(1.0, LARGEST_COEFFICIENT / max(1, int(np.abs(gains).max())))
    chosen = cp.Variable(len(owners), boolean=True)
    one_each = (owners == np.arange(len(tables))[:, None]).astype(float)
    problem = cp.Problem(cp.Maximize((gains * scale) @ chosen), [one_each @ chosen == 1, extra @ chosen <= left])
    return problem, chosen, scale


def _settings(time_limit_s: float, unit: float) -> dict[str, float | int | bool]:
    return {
        # the default starts a thread pool, and a process forked after that hangs in its first solve
        "threads": 1,
        "time_limit": time_limit_s,
        # a heuristic that looks for what the presolve has found already, for half of the solver's time
        "mip_heuristic_run_feasibility_jump": False,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.99 * unit,
        "mip_feasibility_tolerance": 1e-9,
    }


def _counts(tables: Sequence[Options], capacity: int, values: Any) -> Counts | None:
    """The solution in integers, None if it breaks the model's own rules, as the zeros after an early time-out do."""
    ends = np.cumsum([len(table) for table in tables])[:-1]
    parts = np.split(np.rint(np.asarray(values)), ends)
    if any(part.sum() != 1 for part in parts):
        return None
    counts = tuple(int(table.counts[part.argmax()]) for table, part in zip(tables, parts, strict=True))
    return counts if sum(counts) <= capacity else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the solver chose: a column for each owner, None if it found nothing; no choice gains more than `upper`."""

    columns: tuple[int, ...] | None
    upper: float
    proved: bool
    status: str


def choose(
    gains: Integers, owners: Integers, uses: Floats, limits: Floats, *, time_limit_s: float, rel_gap: float = 0.0
) -> Choice:
    """Choose one column for each of the `owners` (0, 1, ...): the greatest sum of `gains`, with `uses` @ chosen <= `limits`.

    `rel_gap` is the relative distance from the optimum at which the solver may stop. Raises nothing.
    """
    import cvxpy as cp

    _swallow_banner()
    num_owners = int(owners.max()) + 1 if len(owners) else 0
    base = np.array([gains[owners == owner].min() for owner in range(num_owners)], dtype=np.int64)
    above = gains - base[owners]
    scale = min(1.0, LARGEST_COEFFICIENT / max(1, int(above.max(initial=0))))
    try:
        chosen = cp.Variable(len(gains), boolean=True)
        one_each = (owners == np.arange(num_owners)[:, None]).astype(float)
        rows = [one_each @ chosen == 1, *([uses @ chosen <= limits] if len(limits) else [])]
        problem = cp.Problem(cp.Maximize((above * scale) @ chosen), rows)
        problem.solve(solver=cp.HIGHS, **(_settings(time_limit_s, scale) | {"mip_rel_gap": rel_gap}))
    except (cp.error.SolverError, ValueError) as error:
        return Choice(columns=None, upper=np.inf, proved=False, status=f"{type(error).__name__}: {error}")
    status = str(problem.status)
    if status not in {cp.OPTIMAL, cp.OPTIMAL_INACCURATE, cp.USER_LIMIT} or chosen.value is None:
        return Choice(columns=None, upper=np.inf, proved=False, status=status)
    picked = np.flatnonzero(np.rint(np.asarray(chosen.value)))
    whole = np.array_equal(owners[picked], np.arange(num_owners))
    # cvxpy minimises the negative
    upper = -float(problem.solver_stats.extra_stats.mip_dual_bound) / scale + float(base.sum())
    columns = tuple(picked.tolist()) if whole else None
    return Choice(columns=columns, upper=upper, proved=status == cp.OPTIMAL and whole, status=status)
