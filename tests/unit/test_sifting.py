"""Sifting columns changes no answer: it equals the plain model, and its bounds hold."""

import time

import numpy as np
import pytest

from unicron_lib.planning import milp, sifting
from unicron_lib.planning.knapsack import Floats, Integers

Model = tuple[Integers, Integers, Floats, Floats]


def model(seed: int, *, num_owners: int = 8, per_owner: int = 12, tightness: float = 0.3) -> Model:
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.arange(num_owners), per_owner)
    uses = rng.integers(1, 30, (3, len(owners))).astype(float)
    uses[:, ::per_owner] = 0.0
    gains = (uses.sum(axis=0) * rng.uniform(0.8, 1.2, len(owners)) * 1e6).astype(np.int64) - 10**6
    return gains, owners, uses, np.array([per_owner * num_owners * tightness] * 3)


def sifted(asked: Model, *, time_limit_s: float = 20.0) -> milp.Choice:
    return sifting.choose(*asked, time_limit_s=time_limit_s, rel_gap=0.0, timer=time.perf_counter)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sifting, "FEW_COLUMNS", 24)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tightness", [0.05, 0.3, 3.0])
def test_the_answer_is_that_of_the_plain_model(seed: int, tightness: float) -> None:
    asked = model(seed, tightness=tightness)
    plain, found = milp.choose(*asked, time_limit_s=20.0), sifted(asked)
    assert plain.columns is not None
    assert found.columns is not None
    assert found.proved
    assert asked[0][list(found.columns)].sum() == asked[0][list(plain.columns)].sum()
    assert (asked[2][:, found.columns].sum(axis=1) <= asked[3] + 1e-6).all()
    assert found.upper == pytest.approx(plain.upper)


@pytest.mark.parametrize("seed", range(8))
def test_prices_bound_every_choice_from_above_and_not_by_far(seed: int) -> None:
    asked = model(seed)
    prices, upper = sifting.priced(*asked)
    plain = milp.choose(*asked, time_limit_s=20.0)
    assert plain.columns is not None
    best = asked[0][list(plain.columns)].sum()
    assert (prices >= 0).all()
    assert best <= upper <= 1.2 * best
    assert (sifting.losses(*asked[:3], prices) >= 0).all()


def test_what_does_not_fit_is_no_choice() -> None:
    gains, owners, uses, _ = model(1)
    found = sifted((gains, owners, uses + 1.0, np.array([1.0, 1.0, 1.0])))
    assert found.columns is None
    assert not found.proved


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_without_time_there_is_still_a_bound() -> None:
    asked = model(2)
    plain = milp.choose(*asked, time_limit_s=20.0)
    assert plain.columns is not None
    assert sifted(asked, time_limit_s=0.0).upper >= asked[0][list(plain.columns)].sum()
