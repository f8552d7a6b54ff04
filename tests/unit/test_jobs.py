"""What a job's description may not say."""

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout

FLOATS = ("weight", "transition_s", "lr", "min_lr", "weight_decay", "clip_grad", "pace_s")


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_finite(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"job 'a': {key} must be a finite number"):
        JobSpec(job="a", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight", 0.0),
        ("weight", -1.0),
        ("weight", 1.1e6),
        ("lr", 0.0),
        ("lr", -1e-3),
        ("min_lr", -1e-9),
        ("pace_s", -0.1),
        ("transition_s", -1.0),
        ("max_restarts", -1),
        ("train_iters", 0),
        ("rerun_check_interval", -1),
        ("load", "newest"),
        ("params_dtype", "int8"),
        ("job", "A b"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: object) -> None:
    spec = {"job": "a", key: value}
    with pytest.raises(ValueError, match="job's name" if key == "job" else key):
        JobSpec(**spec)


@pytest.mark.parametrize("table", [{2: float("nan")}, {2: float("inf")}, {2: -1.0}, {0: 1.0}, {2: 1.1e24}], ids=str)
def test_throughput_is_finite_and_of_at_least_one_gpu(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="throughput_flops"):
        JobSpec(job="a", throughput_flops=table)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight", 1e6), ("weight", 1e-9), ("min_lr", 0.0), ("pace_s", 0.0), ("transition_s", 0.0), ("load", "latest")],
)
def test_the_edges_are_allowed(key: str, value: object) -> None:
    assert getattr(JobSpec(**{"job": "a", key: value}), key) == value


CUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "min_gpus": 4}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tensor_model_parallel_size": 3, "min_gpus": 6}, "does not divide num_attention_heads 4, vocab_size 256"),
        ({"pipeline_model_parallel_size": 3, "min_gpus": 6}, "does not divide num_layers 2"),
        ({"min_gpus": 2}, "min_gpus 2 is no multiple of 4, the GPUs of a replica"),
        ({"max_gpus": 10}, "max_gpus 10 is no multiple of 4"),
        ({"min_gpus": 36}, "min_gpus 36 leaves ranks without work: a global batch has 8 micro-batches"),
        ({"tensor_model_parallel_size": 0, "throughput_flops": {4: 1.0}}, "tensor_model_parallel_size must be greater than 0"),
        ({"command": ("python", "train.py")}, "which knows nothing of tensor_model_parallel_size"),
    ],
)
def test_sizes_of_a_replica_fit_the_model_and_the_limits(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        JobSpec(**{"job": "a", "max_gpus": 40} | CUT | changes)


def test_a_job_runs_on_whole_replicas() -> None:
    spec = JobSpec(job="a", **CUT)
    assert spec.sizes(17) == (4, 8, 12, 16)
    assert spec.sizes(100)[-1] == 32, "more replicas than micro-batches"
    assert [spec.admits(number) for number in (2, 4, 6, 36)] == [False, True, False, False]
    assert spec.layout(12) == Layout(tp=2, pp=2, dp=3)
    assert JobSpec(job="a", throughput_flops={4: 1.0, 6: 2.0, 8: 3.0}, **CUT).sizes(8) == (4, 8)
