"""Throughput tables: given, measured, guessed."""

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.planning.throughput import NOMINAL_FLOPS, SCALING, Profile, profiles, table


def test_a_table_of_its_own_is_taken_as_it_is() -> None:
    spec = JobSpec(job="a", min_gpus=2, max_gpus=6, throughput_flops={2: 2.0, 4: 3.5, 6: 3.0, 8: 9.0})
    profile = profiles([spec], {"a": {2: 77.0}})["a"]
    assert table(spec, profile, num_gpus=8) == {2: 2.0, 4: 3.5, 6: 3.0}
    assert table(spec, profile, num_gpus=5) == {2: 2.0, 4: 3.5}
    assert table(spec, profile, num_gpus=8, granularity_gpus=4) == {4: 3.5}


def test_measured_sizes_are_kept_and_others_follow_from_them() -> None:
    profile = Profile(job="a", points={2: 100.0, 8: 300.0})
    assert (profile.flops(2), profile.flops(8)) == (100.0, 300.0)
    assert profile.flops(4) == pytest.approx(100.0 * 3.0**0.5)
    assert profile.flops(16) == pytest.approx(300.0 * 2.0**SCALING)
    assert profile.flops(1) == pytest.approx(100.0 * 0.5**SCALING)
    assert profile.flops(0) == 0.0


def test_the_guess_rises_with_the_size_and_falls_per_gpu() -> None:
    spec = JobSpec(job="a")
    flops = list(table(spec, profiles([spec], {})["a"], num_gpus=8).values())
    assert len(flops) == 8
    assert flops == sorted(flops)
    assert flops[0] == NOMINAL_FLOPS
    per_gpu = [rate / size for size, rate in enumerate(flops, start=1)]
    assert per_gpu == sorted(per_gpu, reverse=True)


def test_an_unknown_job_is_taken_for_an_average_one() -> None:
    known, new = JobSpec(job="known"), JobSpec(job="new")
    found = profiles([known, new], {"known": {1: 4e9}})
    assert found["new"].flops(1) == pytest.approx(4e9)


@pytest.mark.parametrize("flops", [float("nan"), float("inf"), -1.0])
def test_a_measurement_that_cannot_be_is_refused_with_the_name(flops: float) -> None:
    with pytest.raises(UserError, match="job a: the throughput of 4 GPUs is"):
        profiles([JobSpec(job="a")], {"a": {4: flops}})
