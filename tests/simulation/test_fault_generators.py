"""Generated traces: the counts that were asked for, the statistics of the hazard, and the same again for the same seed."""

from itertools import pairwise
from statistics import median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.generators import (
    DAY_S,
    FIGURE_1,
    STEPFUN_REPAIR,
    Episode,
    Hazard,
    generated,
    trace_a,
    trace_b,
)

SEEDS = st.integers(0, 10_000)


def variation(values: list[float]) -> float:
    """Coefficient of variation."""
    return stdev(values) / (sum(values) / len(values))


@given(SEEDS)
def test_the_papers_traces_have_the_papers_counts(seed: int) -> None:
    for made, sev1, others, days in ((trace_a(seed), 10, 33, 56), (trace_b(seed), 26, 80, 7)):
        assert sum(fault.takes_node for fault in made.faults) == sev1
        assert len(made.faults) == sev1 + others
        assert made.duration_s == days * DAY_S
        assert {fault.kind for fault in made.faults} <= set(FIGURE_1)


@given(SEEDS)
def test_no_fault_of_the_papers_traces_strikes_a_node_that_is_away(seed: int) -> None:
    back: dict[int, float] = {}
    for fault in trace_b(seed).faults:
        assert back.get(fault.node, 0.0) <= fault.at_s
        back[fault.node] = fault.at_s + fault.repair_s


def test_only_what_takes_a_node_is_repaired() -> None:
    made = trace_a(1)
    assert all((fault.repair_s > 0) is fault.takes_node for fault in made.faults)


@given(SEEDS)
def test_a_seed_is_a_trace(seed: int) -> None:
    hazard = Hazard(per_node_day=0.1, spread=1.0, burstiness=2.0)
    again = [generated(hazard, seed, num_nodes=20, duration_s=10 * DAY_S) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != generated(hazard, seed + 1, num_nodes=20, duration_s=10 * DAY_S)


def test_kinds_follow_figure_1() -> None:
    made = generated(Hazard(per_node_day=1.0), 3, num_nodes=100, duration_s=200 * DAY_S)
    total = sum(FIGURE_1.values())
    for kind, share in FIGURE_1.items():
        seen = sum(fault.kind is kind for fault in made.faults) / len(made.faults)
        assert seen == pytest.approx(share / total, abs=0.015)
    assert total == pytest.approx(43.4, abs=0.1)  # the paper's share of tasks that end abnormally


def test_the_rate_and_the_gaps_are_those_asked_for() -> None:
    for burstiness in (1.0, 1.76):
        made = generated(Hazard(per_node_day=1.0, burstiness=burstiness), 5, num_nodes=100, duration_s=200 * DAY_S)
        assert len(made.faults) == pytest.approx(20_000, rel=0.05)
        gaps = [after.at_s - before.at_s for before, after in pairwise(made.faults)]
        assert variation(gaps) == pytest.approx(burstiness, rel=0.05)


def test_lemons_differ_more_than_chance() -> None:
    spreads = {}
    for spread in (0.0, 1.0):
        made = generated(Hazard(per_node_day=0.5, spread=spread), 5, num_nodes=400, duration_s=100 * DAY_S)
        counts = [0.0] * 400
        for fault in made.faults:
            counts[fault.node] += 1
        spreads[spread] = variation(counts)
    assert spreads[0.0] == pytest.approx((1 / 50) ** 0.5, rel=0.15)
    assert spreads[1.0] == pytest.approx((1 + 1 / 50) ** 0.5, rel=0.15)


def test_heat_multiplies_the_rate_while_it_lasts() -> None:
    heat = Episode(from_s=10 * DAY_S, until_s=20 * DAY_S, factor=5.0)
    made = generated(Hazard(per_node_day=1.0, episodes=(heat,)), 2, num_nodes=100, duration_s=30 * DAY_S)
    during = sum(heat.from_s <= fault.at_s < heat.until_s for fault in made.faults)
    assert during == pytest.approx(5_000, rel=0.07)
    assert len(made.faults) - during == pytest.approx(2_000, rel=0.1)


def test_repairs_are_log_normal_and_bounded() -> None:
    kinds = {ErrorKind.ECC_ERROR: 1.0}
    made = generated(Hazard(per_node_day=1.0, kinds=kinds), 4, num_nodes=100, duration_s=100 * DAY_S)
    repairs = [fault.repair_s for fault in made.faults]
    assert median(repairs) == pytest.approx(STEPFUN_REPAIR.median_s, rel=0.1)
    assert max(repairs) == STEPFUN_REPAIR.most_s


@pytest.mark.parametrize(
    "rates", [{"per_node_day": 0.0}, {"per_node_day": 1.0, "burstiness": 0.0}, {"per_node_day": float("nan")}]
)
def test_a_hazard_out_of_range_is_refused(rates: dict[str, float]) -> None:
    with pytest.raises(UserError, match="a hazard needs"):
        Hazard(**rates)


def test_an_episode_must_have_a_length() -> None:
    with pytest.raises(UserError, match="from_s before until_s"):
        Hazard(per_node_day=1.0, episodes=(Episode(from_s=2.0, until_s=1.0, factor=2.0),))


def test_a_fault_or_a_trace_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="rank_share below 1"):
        Fault(at_s=0.0, kind=ErrorKind.OTHER, node=0, rank_share=1.0)
    late = Fault(at_s=5.0, kind=ErrorKind.OTHER, node=0)
    with pytest.raises(UserError, match="within its 4 s"):
        Trace(name="t", source="s", duration_s=4.0, faults=(late,))
    with pytest.raises(UserError, match="must last"):
        Trace(name="t", source="s", duration_s=0.0, faults=())
