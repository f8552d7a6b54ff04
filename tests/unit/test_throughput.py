"""Throughput tables: given, measured, guessed."""

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.planning.throughput import SCALING, Profile, profiles, table


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


def test_the_model_knows_that_only_whole_micro_batches_count() -> None:
    spec = JobSpec(job="a", global_batch_size=8)
    flops = table(spec, profiles([spec], {})["a"], num_gpus=16)
    assert list(flops) == list(range(1, 9))
    assert flops[1] < flops[2] < flops[3] < flops[4] < flops[8]
    # the slowest of 5, 6 or 7 ranks has two micro-batches, as each of 4 has
    assert max(flops[5], flops[6], flops[7]) <= flops[4]
    assert all(rate / size <= flops[1] for size, rate in flops.items())


def test_measurements_calibrate_the_model_and_are_kept() -> None:
    spec = JobSpec(job="a", global_batch_size=8)
    plain, measured = (profiles([spec], points)["a"] for points in ({}, {"a": {2: 100.0, 4: 150.0}}))
    assert (measured.flops(2), measured.flops(4)) == (100.0, 150.0)
    assert measured.flops(8) / 150.0 == pytest.approx(plain.flops(8) / plain.flops(4))
    assert 100.0 < measured.flops(3) < 150.0


def test_a_measurement_of_nothing_is_kept_but_scales_nothing() -> None:
    spec = JobSpec(job="a")
    plain, measured = (profiles([spec], points)["a"] for points in ({}, {"a": {2: 0.0}}))
    assert measured.flops(2) == 0.0
    assert measured.flops(4) == plain.flops(4)


def test_an_unknown_job_is_scaled_as_the_known_ones_are() -> None:
    known, same = JobSpec(job="known"), JobSpec(job="same")
    found = profiles([known, same], {"known": {1: 4e9}})
    assert found["same"].flops(1) == pytest.approx(4e9)
    wide = JobSpec(job="wide", hidden_size=128)
    alone, beside = (profiles(specs, {"known": {1: 4e9}}) for specs in ([known, wide], [known, wide, same]))
    ratio = alone["wide"].flops(1) / 4e9
    assert ratio == pytest.approx(profiles([wide], {})["wide"].flops(1) / profiles([known], {})["known"].flops(1))
    assert beside["wide"].flops(1) == pytest.approx(alone["wide"].flops(1))


def test_jobs_are_compared_on_one_device() -> None:
    """A bfloat16 job is trained on GPUs, so whatever shares its cluster is too."""
    toy, real = JobSpec(job="toy"), JobSpec(job="real", params_dtype="bfloat16")
    found = profiles([toy, real], {})
    assert found["toy"].flops(1) == found["real"].flops(1)
    assert found["toy"].flops(1) != profiles([toy], {})["toy"].flops(1)


def test_a_job_is_only_offered_the_layouts_that_the_trainer_can_run() -> None:
    """A model far beyond one GPU is still reckoned with data parallelism only, in the layout that the plan gives it."""
    spec = JobSpec(job="big", num_layers=96, hidden_size=12288, num_attention_heads=96, global_batch_size=64)
    flops = table(spec, profiles([spec], {})["big"], num_gpus=8)
    assert list(flops) == list(range(1, 9))
    assert all(spec.layout(size).tp == spec.layout(size).pp == 1 for size in flops)


@pytest.mark.parametrize("flops", [float("nan"), float("inf"), -1.0])
def test_a_measurement_that_cannot_be_is_refused_with_the_name(flops: float) -> None:
    with pytest.raises(UserError, match="job a: the throughput of 4 GPUs is"):
        profiles([JobSpec(job="a")], {"a": {4: flops}})
