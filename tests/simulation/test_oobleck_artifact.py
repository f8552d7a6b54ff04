"""What can be had of Oobleck's artifact: Varuna's average for BERT-large; that of GPT-3 6.7B is not reached, and said so."""

import pytest

from unicron_lib.simulation.oobleck_artifact import MODELS, PUBLISHED, average, evenly


def test_varuna_on_bert_large_is_near_what_is_published():
    """The trace is not the artifact's own, so a few per cent are left."""
    assert average(MODELS["bert-large"], evenly()) == pytest.approx(PUBLISHED["bert-large", "varuna"], rel=0.03)


def test_varuna_on_gpt_3_is_not_reproduced():
    """If this fails, the model has come nearer: correct what is said of it."""
    assert average(MODELS["gpt-3-6.7b"], evenly()) > 3 * PUBLISHED["gpt-3-6.7b", "varuna"]


@pytest.mark.parametrize("name", MODELS)
def test_rarer_failures_leave_more_and_never_more_than_all(name):
    model = MODELS[name]
    rates = [average(model, evenly(gap_s)) for gap_s in (3600.0, 6 * 3600.0, 24 * 3600.0)]
    assert rates == sorted(rates)
    assert rates[-1] < max(model.throughput)
    # what the checkpoints leave of it, and the mean of shrinking tables
    mean = sum(model.throughput) / len(model.throughput)
    cycle_s = 10 * model.samples / mean
    assert rates[-1] == pytest.approx(mean * cycle_s / (cycle_s + model.checkpoint_s), rel=0.1)
