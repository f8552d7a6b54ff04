"""A job that may run in several parallel layouts: what its owner may write, and what follows for its sizes."""

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import UserError
from unicron_lib.jobfile import job_spec, parse_spec

WHOLE = {}
LINE = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}


def spec_of(*layouts: dict, **keys: object) -> JobSpec:
    return parse_spec({"job": "a", "parallel_layouts": list(layouts), **keys}, where="a.yaml")


def test_sizes_are_those_of_any_layout() -> None:
    spec = spec_of({"tensor_model_parallel_size": 4}, {**LINE, **STAGES}, LINE, min_gpus=2)
    assert spec_of(LINE, WHOLE).sizes(5) == (1, 2, 3, 4, 5)
    assert spec_of(LINE, WHOLE, min_gpus=2, max_gpus=4).sizes(9) == (2, 3, 4)
    assert spec_of(LINE, WHOLE).sizes(99) == (*range(1, 9), 10, 12, 14, 16), "each replica has one of 8 micro-batches"
    assert spec.layouts(4) == (Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2))
    assert spec.layouts(2) == (Layout(tp=2),)
    assert not spec.layouts(3)
    assert [spec.admits(size) for size in (1, 2, 3, 4, 20)] == [False, True, False, True, True]


def test_sizes_of_tables_are_those_that_are_listed_in_one_of_them() -> None:
    spec = spec_of({**LINE, "throughput_flops": {2: 3.0e8, 4: 5.0e8}}, {**WHOLE, "throughput_flops": {1: 1.0e8, 2: 2.0e8}})
    assert spec.sizes(9) == (1, 2, 4)
    assert spec.layouts(4) == (Layout(tp=2, dp=2),)


def test_where_nothing_else_tells_the_most_replicas_run() -> None:
    assert spec_of(LINE, WHOLE).layout(4) == Layout(dp=4)
    assert spec_of(LINE, STAGES, min_gpus=2).layout(4) == Layout(tp=2, dp=2)


@pytest.mark.parametrize(
    ("layouts", "keys", "sentence"),
    [
        ([LINE, WHOLE], {"tensor_model_parallel_size": 2, "min_gpus": 2}, "are one fixed layout, parallel_layouts several"),
        ([LINE, WHOLE, LINE], {}, "parallel_layouts has tp=2 pp=1 more than once"),
        ([{"tensor_model_parallel_size": 3}, WHOLE], {}, "tensor_model_parallel_size 3 does not divide num_attention_heads 4"),
        ([WHOLE, {"pipeline_model_parallel_size": 3}], {}, "pipeline_model_parallel_size 3 does not divide num_layers 2"),
        ([LINE, {**LINE, **STAGES}], {}, "min_gpus 1 is no multiple of 2 or 4, the GPUs of a replica in one of its"),
        ([LINE, WHOLE], {"min_gpus": 17, "max_gpus": 40}, "min_gpus 17 leaves ranks without work"),
        ([{**LINE, "throughput_flops": {2: 1.0e8}}, WHOLE], {}, "some of parallel_layouts have throughput_flops, others not"),
        ([{**LINE, "throughput_flops": {2: 1.0e8}}], {"min_gpus": 4, "max_gpus": 8}, "has no size that min_gpus"),
        ([{**LINE, "throughput_flops": {2: -1.0}}], {"min_gpus": 2}, "numbers of GPUs (1 or more) to finite FLOP/s"),
        (
            [{**LINE, "throughput_flops": {2: 1.0e8}}],
            {"min_gpus": 2, "throughput_flops": {2: 1.0e8}},
            "parallel_layouts have throughput_flops of their own, and so has the job",
        ),
        ([{**LINE, "throughput_flops": {2: "1e8"}}], {"min_gpus": 2}, "'1e8' is text: write a number"),
        ([{"tensor_model_parallel_size": 0}], {}, "must be greater than 0"),
        ([{"tp": 2}], {}, "unknown key 'parallel_layouts.0.tp'"),
        ([[2, 1]], {}, "parallel_layouts.0"),
        ([WHOLE], {"command": ["python", "train.py"]}, "which knows nothing of parallel_layouts"),
    ],
)
def test_a_mistake_is_one_sentence(layouts: list, keys: dict, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        spec_of(*layouts, **keys)
    assert sentence in str(error.value)


def test_layouts_survive_json() -> None:
    spec = JobSpec(job="a", parallel_layouts=(ParallelLayout(tensor_model_parallel_size=2), ParallelLayout()))
    assert job_spec.validate_json(job_spec.dump_json(spec)) == spec
