"""What cvxpy and HiGHS do on bad input and bad luck, and that none of it gets through (found on cvxpy 1.9, HiGHS 1.16)."""

import subprocess
import sys
import threading
import time

import cvxpy
import numpy as np
import pytest

from unicron_lib.planning import knapsack, milp
from unicron_lib.planning.knapsack import Options


def table(*options: tuple[int, int]) -> Options:
    counts, gains = (np.array(column, dtype=np.int64) for column in zip(*options, strict=True))
    return Options(counts=counts, gains=gains, values=gains)


def hard() -> tuple[Options, ...]:
    """Near-ties all over, and a capacity that no sum of sizes hits: seconds of branch and bound."""
    rng = np.random.default_rng(1)
    counts = [7 * np.unique(rng.integers(1, 2000, 60)) for _ in range(60)]
    return tuple(table((0, 0), *((int(k), int(1_000_000 * k + rng.integers(0, 100_000))) for k in own)) for own in counts)


HARD_CAPACITY = 20_001
SMALL = (table((0, 0), (2, 5), (4, 8)), table((0, -3), (3, 4)))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    setup = "from unicron_lib.planning import milp\nimport numpy as np\nfrom unicron_lib.planning.knapsack import Options\n"
    setup += "k = np.arange(4, dtype=np.int64)\nsmall = (Options(counts=k, gains=k, values=k),)\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=60, check=False)


def test_the_optimum_is_found_and_proved() -> None:
    assert milp.solve(SMALL, 5, time_limit_s=10.0) == milp.Solution(counts=(2, 3), proved=True, status="optimal")


def test_minima_that_do_not_fit_are_no_solution() -> None:
    found = milp.solve((table((3, 1), (4, 2)), table((3, 1))), 5, time_limit_s=10.0)
    assert found.counts is None
    assert not found.proved
    assert "infeasible" in found.status


def test_a_model_without_variables_is_no_solution_and_no_exception() -> None:
    assert milp.solve((), 5, time_limit_s=10.0).counts is None


def test_a_setting_that_highs_refuses_is_no_exception() -> None:
    found = milp.solve(SMALL, 5, time_limit_s=-1.0)
    assert found.counts is None
    assert "ValueError" in found.status


def test_a_time_out_without_a_solution_is_not_taken_for_zeros() -> None:
    with pytest.warns(UserWarning, match="may be inaccurate"):
        found = milp.solve(hard(), HARD_CAPACITY, time_limit_s=0.0)
    assert found.status == cvxpy.USER_LIMIT
    assert found.counts is None
    assert not found.proved


def test_zeros_under_user_limit_are_what_cvxpy_itself_shows() -> None:
    """The trap behind the test before: `_counts` is what finds them out."""
    problem, chosen, unit = milp._model(cvxpy, hard(), HARD_CAPACITY)
    with pytest.warns(UserWarning, match="may be inaccurate"):
        problem.solve(solver=cvxpy.HIGHS, **milp._settings(0.0, unit))
    assert problem.status == cvxpy.USER_LIMIT
    assert not np.asarray(chosen.value).any()


def test_gains_that_differ_in_the_ninth_digit_are_told_apart() -> None:
    tables = (table((0, 0), (1, 1_000_000_000), (2, 1_000_000_001)), table((0, 0), (1, 999_999_999)))
    assert milp.solve(tables, 3, time_limit_s=10.0).counts == (2, 1)
    assert milp.solve(tables, 2, time_limit_s=10.0).counts == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_solver_equals_the_dynamic_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(6):
        counts = np.unique(np.concatenate(([0], rng.integers(1, 40, 12))))
        gains = np.sort(rng.integers(-(10**9), 10**9, len(counts)))
        tables.append(Options(counts=counts, gains=gains, values=gains))
    found = milp.solve(tables, 64, time_limit_s=20.0)
    assert found.proved
    assert found.counts is not None
    assert knapsack.total_gain(tables, found.counts) == knapsack.total_gain(tables, knapsack.best(tables, 64))


def test_threads_may_solve_at_the_same_time() -> None:
    found: list[milp.Solution] = []
    threads = [threading.Thread(target=lambda: found.append(milp.solve(SMALL, 5, time_limit_s=10.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [solution.counts for solution in found] == [(2, 3)] * 4


def test_a_process_forked_after_a_solve_can_solve() -> None:
    done = run_python(
        "import os, signal\n"
        "milp.warm_up()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    os._exit(0 if milp.solve(small, 3, time_limit_s=5.0).counts == (3,) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert done.stdout == "0\n", done.stderr


def test_another_solve_with_other_threads_before_is_survived() -> None:
    """HiGHS refuses a second number of threads in a process; then the answer is none, and not an exception."""
    done = run_python(
        "import cvxpy as cp\n"
        "x = cp.Variable(3, boolean=True)\n"
        "cp.Problem(cp.Maximize(cp.sum(x)), [cp.sum(x) <= 2]).solve(solver=cp.HIGHS, threads=2)\n"
        "found = milp.solve(small, 3, time_limit_s=5.0)\n"
        "import sys; print(found.counts, found.status.split(':')[0], file=sys.stderr)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "None SolverError" in done.stderr


def test_nothing_is_printed_where_json_is_due() -> None:
    done = run_python("milp.warm_up()\nmilp.solve(small, 3, time_limit_s=5.0)\n")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_planning_does_not_import_cvxpy_until_it_solves() -> None:
    done = run_python(
        "import sys\nimport unicron_lib.planning.planner, unicron_lib.planning.scenario\nprint('cvxpy' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


def test_the_time_limit_holds_and_what_was_found_by_then_is_valid() -> None:
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="may be inaccurate"):
        found = milp.solve(hard(), HARD_CAPACITY, time_limit_s=0.3)
    assert time.perf_counter() - started < 10.0
    assert (found.status, found.proved) == (cvxpy.USER_LIMIT, False)
    assert found.counts is None or sum(found.counts) <= HARD_CAPACITY
