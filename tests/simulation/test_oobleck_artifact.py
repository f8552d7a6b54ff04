"""The published averages of Oobleck's artifact, from our own code and its rules, trace and tables."""

import pytest

from unicron_lib.simulation.oobleck_artifact import MODELS, PUBLISHED, average, trace


@pytest.mark.parametrize(("model", "system"), PUBLISHED)
def test_every_published_average_comes_out(model: str, system: str) -> None:
    assert round(average(model, system, trace()), 2) == PUBLISHED[model, system]


@pytest.mark.parametrize(("model", "system"), MODELS)
def test_rarer_losses_leave_more_and_never_more_than_all(model: str, system: str) -> None:
    rates = [average(model, system, trace(hours * 3_600_000)) for hours in (1, 6, 24)]
    assert rates == sorted(rates)
    assert rates[-1] < max(MODELS[model, system].throughput)


def test_who_is_lost_counts_for_bamboo_only() -> None:
    """It goes on with a node's work in the place of another; the others meet anew whoever is lost."""
    others = tuple((at_ms, number) for number, (at_ms, _) in enumerate(trace(), start=1))
    changed = {system for (model, system) in MODELS if average(model, system, others) != average(model, system, trace())}
    assert changed == {"bamboo"}
