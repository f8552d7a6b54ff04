"""How often checkpoints pay, by Young and Daly."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.planning.cadence import LEAST_S, MOST_S, UNMEASURED_S, daly_s, pause_s

costs = st.floats(1e-3, 1e4)
times = st.floats(1.0, 1e9)


def test_where_failures_are_rare_it_is_young_s() -> None:
    assert daly_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(300.0, 86_400.0), (5.0, 3600.0), (60.0, 21_600.0)])
def test_no_other_interval_loses_much_less(cost_s: float, mtbf_s: float) -> None:
    """Daly's model of the whole run time, with exponential failures and no time to restart."""

    def overhead(interval_s: float) -> float:
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    least = min(overhead(math.exp(step / 100)) for step in range(1300))
    assert overhead(daly_s(cost_s, mtbf_s)) <= 1.0002 * least


@given(cost_s=costs, mtbf_s=times)
def test_it_is_positive_and_at_most_what_young_says_and_a_bit(cost_s: float, mtbf_s: float) -> None:
    assert 0 < daly_s(cost_s, mtbf_s) <= 1.5 * math.sqrt(2 * cost_s * mtbf_s)


@given(blocking_s=st.floats(0, 1e4), upload_s=st.floats(0, 1e5), mtbf_s=times)
def test_the_bounds_hold(blocking_s: float, upload_s: float, mtbf_s: float) -> None:
    found = pause_s(blocking_s=blocking_s, upload_s=upload_s, mtbf_s=mtbf_s)
    assert max(LEAST_S, min(2 * upload_s, found)) <= found <= max(MOST_S, 2 * upload_s)
    assert found >= 2 * upload_s or blocking_s + upload_s == 0


@given(upload_s=st.floats(0.1, 100), mtbf_s=times, more=st.floats(1, 100))
def test_the_rarer_failures_the_rarer_checkpoints(upload_s: float, mtbf_s: float, more: float) -> None:
    often = pause_s(blocking_s=0.1, upload_s=upload_s, mtbf_s=mtbf_s)
    assert pause_s(blocking_s=0.1, upload_s=upload_s, mtbf_s=mtbf_s * more) >= often * (1 - 1e-9)


def test_what_is_not_known_yet() -> None:
    assert pause_s(blocking_s=0, upload_s=0, mtbf_s=1e6) == UNMEASURED_S
    assert pause_s(blocking_s=1, upload_s=1, mtbf_s=0) == UNMEASURED_S
