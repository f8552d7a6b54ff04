"""General programmes in integers: what is said of those without a solution, without columns, without time."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from unicron_lib.planning.milp import INFEASIBLE, Program, minimise


def program(
    cost: list[int],
    most: list[int],
    rows: Sequence[tuple[list[int], int, bool]] = (),
    least: list[int] | None = None,
) -> Program:
    entries = [(r, c, value) for r, (values, _, _) in enumerate(rows) for c, value in enumerate(values) if value]
    return Program(
        cost=np.array(cost, dtype=np.int64),
        at_least=np.array(least or [0] * len(cost), dtype=np.int64),
        at_most=np.array(most, dtype=np.int64),
        entries=np.array(entries, dtype=np.int64).reshape(-1, 3),
        limits=np.array([limit for _, limit, _ in rows], dtype=np.int64),
        exact=np.array([exact for _, _, exact in rows], dtype=np.bool_),
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_brute_force_finds(seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows = [(dice.integers(-3, 4, 4).tolist(), int(dice.integers(-2, 8)), row == 0) for row in range(3)]
    made = program(dice.integers(-9, 10, 4).tolist(), [3, 2, 3, 1], rows)
    points = (np.array(point) for point in itertools.product(range(4), range(3), range(4), range(2)))
    best = min((int(made.cost @ point) for point in points if made.holds(point)), default=None)
    found = minimise(made, time_limit_s=10.0)
    if best is None:
        assert (found.values, found.proved, found.status) == (None, False, INFEASIBLE)
    else:
        assert found.values is not None
        assert found.proved
        assert made.holds(found.values)
        assert made.cost @ found.values == best


def test_costs_that_differ_in_the_ninth_digit_are_told_apart() -> None:
    made = program([-1_000_000_000, -999_999_999], [1, 1], [([1, 1], 1, False)])
    found = minimise(made, time_limit_s=10.0)
    assert found.values is not None
    assert found.values.tolist() == [1, 0]


def test_without_columns_the_rows_decide() -> None:
    assert minimise(program([], []), time_limit_s=1.0).proved
    assert minimise(program([], [], [([], 1, True)]), time_limit_s=1.0).status == INFEASIBLE


def test_a_setting_that_the_solver_refuses_is_no_exception() -> None:
    found = minimise(program([1], [1], [([1], 1, True)]), time_limit_s=-1.0)
    assert (found.values, found.proved) == (None, False)
    assert "ValueError" in found.status


def test_bounds_below_are_kept() -> None:
    found = minimise(program([1, 1], [5, 5], [([1, 1], 9, False)], least=[2, 3]), time_limit_s=5.0)
    assert found.values is not None
    assert found.values.tolist() == [2, 3]
