"""Published formulas, held against published figures."""

import random
import statistics

import pytest

from unicron_lib.errors import UserError
from unicron_lib.simulation.closed_forms import HOUR_S, ManualRestart, best_interval_s, expected_ettr, lognormal_sigma, mttf_s


@pytest.mark.parametrize(("num_gpus", "hours"), [(16_384, 1.80), (131_072, 0.225)])
def test_rsc_projects_the_time_between_failures(num_gpus, hours):
    assert mttf_s(num_gpus) / HOUR_S == pytest.approx(hours, rel=0.005)


def test_a_restart_by_hand_takes_68_minutes():
    assert ManualRestart().total_s == 68 * 60


def simulated_ettr(*, mttf_s, restart_s, interval_s, write_s, seed):
    """The share of useful time of one job that trains, saves and fails, played through."""
    chance = random.Random(seed)
    useful = lost = 0.0
    for _ in range(20_000):
        left = chance.expovariate(1 / mttf_s)
        saved = int(left // (interval_s + write_s))
        useful += saved * interval_s
        lost += left - saved * interval_s + restart_s
    return useful / (useful + lost)


@pytest.mark.parametrize("share", [0.005, 0.01, 0.02])
def test_the_expected_ettr_is_what_happens(share):
    times = {"mttf_s": 100_000.0, "restart_s": 300.0, "interval_s": 200_000.0 * share, "write_s": 20.0}
    assert simulated_ettr(**times, seed=1) == pytest.approx(expected_ettr(**times), abs=0.002)


def test_no_interval_is_better_than_the_best():
    write_s, between_s = 30.0, 50_000.0
    best = best_interval_s(write_s, between_s)
    ettr = {
        factor: expected_ettr(mttf_s=between_s, restart_s=0.0, interval_s=best * factor, write_s=write_s)
        for factor in (0.3, 0.7, 1.0, 1.5, 3.0)
    }
    assert max(ettr.values()) == ettr[1.0]


def test_a_hopeless_job_makes_no_progress():
    assert expected_ettr(mttf_s=10.0, restart_s=60.0, interval_s=600.0, write_s=1.0) == 0.0


@pytest.mark.parametrize(
    ("mean", "median", "sigma"),
    # time to failure of Acme's Table 3: NVLink, CUDA, ECC
    [(868.1, 155.3, 1.855), (923.2, 586.0, 0.953), (1303.4, 1192.3, 0.422)],
)
def test_sigma_of_the_times_of_acme(mean, median, sigma):
    found = lognormal_sigma(mean, median)
    assert found == pytest.approx(sigma, abs=0.002)
    chance = random.Random(3)
    drawn = [median * chance.lognormvariate(0.0, found) for _ in range(100_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(median, rel=0.02)


@pytest.mark.parametrize(("mean", "median"), [(1.0, 2.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_no_lognormal_has_a_mean_below_its_median(mean, median):
    with pytest.raises(UserError, match="log-normal"):
        lognormal_sigma(mean, median)
