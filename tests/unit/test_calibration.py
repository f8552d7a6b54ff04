"""One monotone scaling of the model through the measured points."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unicron_lib.planning.calibration import Scaling, calibrated

positive = st.floats(1e-3, 1e15)
tables = st.dictionaries(st.integers(1, 64), st.tuples(positive, positive), min_size=1, max_size=8)


def linear(size: int) -> float:
    return 100.0 * size


def test_nothing_measured_leaves_the_model_as_it_is() -> None:
    assert calibrated(linear, {})(123.0) == 123.0
    assert Scaling()(0.0) == 0.0


def test_one_point_scales_in_proportion() -> None:
    scaling = calibrated(linear, {4: 40.0})
    assert scaling(400.0) == pytest.approx(40.0)
    assert scaling(800.0) == pytest.approx(80.0)
    assert scaling(100.0) == pytest.approx(10.0)


def test_figures_at_the_edge_of_floats_stay_finite() -> None:
    assert calibrated(linear, {1: 1e308})(1e9) < float("inf")
    assert calibrated(linear, {1: 5e-324})(100.0) >= 0.0


def test_two_points_are_met_and_between_them_a_power_holds() -> None:
    scaling = calibrated(linear, {1: 50.0, 16: 200.0})
    assert scaling(100.0) == pytest.approx(50.0)
    assert scaling(1600.0) == pytest.approx(200.0)
    assert scaling(400.0) == pytest.approx(100.0)
    assert scaling(3200.0) == pytest.approx(400.0)


def test_contradictions_are_pooled_and_zeros_left_out() -> None:
    scaling = calibrated(linear, {1: 40.0, 2: 10.0, 3: 0.0, 4: 80.0})
    assert scaling(100.0) == scaling(200.0) == pytest.approx(20.0)
    assert scaling(400.0) == pytest.approx(80.0)


@given(tables, st.lists(positive, min_size=2, max_size=20))
def test_the_order_of_the_model_is_kept(table: dict[int, tuple[float, float]], asked: list[float]) -> None:
    scaling = calibrated(lambda size: table[size][0], {size: flops for size, (_, flops) in table.items()})
    real = [scaling(flops) for flops in sorted(asked)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(real))


@given(st.lists(positive, min_size=1, max_size=8, unique=True), st.lists(positive, min_size=8, max_size=8, unique=True))
def test_points_in_the_model_s_order_are_met(models: list[float], reals: list[float]) -> None:
    ordered = sorted(models)
    assume(all(more > 1.000001 * less for less, more in itertools.pairwise(ordered)))  # apart by more than logarithms round
    pairs = dict(enumerate(zip(ordered, sorted(reals[: len(models)]), strict=True), start=1))
    scaling = calibrated(lambda size: pairs[size][0], {size: real for size, (_, real) in pairs.items()})
    for model, real in pairs.values():
        assert scaling(model) == pytest.approx(real, rel=1e-6)
