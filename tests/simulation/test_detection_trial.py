"""A day of training with realistic jitter: no false alarm, every injected hang and straggler found."""

from dataclasses import replace

import pytest

from unicron_lib.detection.trial import Scenario, try_detection

LENGTHS = {"fixed": (1.0,), "varied": (0.5, 0.75, 1.0, 1.5, 2.0)}
SIGMAS = (0.05, 0.1, 0.3)


def judge(scenario, seed):
    verdict = try_detection(replace(scenario, seed=seed))
    story = f"seed {seed}: {scenario} -> {verdict}"
    print(story)  # noqa: T201
    assert verdict.hours >= scenario.hours, story
    assert verdict.hangs + verdict.stragglers > 0, story
    assert verdict.false_alarms == 0, story
    assert (verdict.recall, verdict.precision) == (1.0, 1.0), story
    assert verdict.ok, story
    return verdict


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_day_of_twenty_second_iterations(sigma, lengths):
    judge(Scenario(iteration_s=20.0, sigma=sigma, lengths=LENGTHS[lengths]), seed=1)


@pytest.mark.parametrize(("sigma", "lengths"), [(0.05, "fixed"), (0.1, "varied"), (0.3, "fixed")])
def test_a_day_of_one_second_iterations(sigma, lengths):
    verdict = judge(Scenario(sigma=sigma, lengths=LENGTHS[lengths]), seed=2)
    assert verdict.hangs > 20
    assert verdict.stragglers > 20
    assert verdict.spinning > 0
    assert verdict.latest_hang <= 3.0 + 0.5 / verdict.mean_s


def test_an_hour_of_short_iterations():
    judge(Scenario(iteration_s=0.2, hours=1.0), seed=3)


def test_the_same_seed_gives_the_same_verdict():
    scenario = Scenario(iteration_s=20.0, hours=6.0, seed=4)
    assert try_detection(scenario) == try_detection(scenario)


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("iteration_s", [0.2, 1.0, 20.0])
def test_many_days(iteration_s, sigma, lengths, seed):
    judge(Scenario(iteration_s=iteration_s, sigma=sigma, lengths=LENGTHS[lengths]), seed=100 + seed)
