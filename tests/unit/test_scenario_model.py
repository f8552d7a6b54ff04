"""Jobs of a scenario that are given by their model."""

import time
from typing import Any

import pytest

from unicron_lib.errors import UserError
from unicron_lib.planning import scenario

SEVEN_B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "vocab_size": 51200,
    "global_batch_size": 1024,
}
GPT3 = SEVEN_B | {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "global_batch_size": 1536}


def document(**more: Any) -> dict[str, Any]:
    return {
        "cluster": {"num_nodes": 16, "gpus_per_node": 8, "mtbf_gpu_s": 6.2e7},
        "jobs": [
            {"job": "small", "model": SEVEN_B, "max_gpus": 64, **more},
            {"job": "large", "model": GPT3, "weight": 2.0, "max_gpus": 96},
        ],
    }


def answer(made: dict[str, Any]) -> dict[str, Any]:
    return scenario.answer(scenario.parse(made), timer=time.perf_counter)


def test_a_model_stands_for_the_table_and_each_job_carries_its_layout() -> None:
    found = answer(document())
    assert found["optimal"]
    for job, num_gpus in found["gpus"].items():
        layout = found["layout"][job]
        assert layout["tp"] * layout["pp"] * layout["dp"] == num_gpus > 0
    assert found["layout"]["large"]["tp"] * found["layout"]["large"]["pp"] >= 48


def test_what_was_measured_goes_before_the_model_and_scales_the_rest() -> None:
    plain, calibrated = (scenario.parse(document(throughput_flops=table)) for table in ({}, {16: 1.0e15}))
    before, after = (scenario.flops_of(one, one.jobs[0]) for one in (plain, calibrated))
    assert after[16] == 1.0e15
    assert after[32] / before[32] == pytest.approx(after[16] / before[16])


def test_sizes_below_the_memory_s_minimum_are_not_offered() -> None:
    made = scenario.parse(document())
    assert min(scenario.flops_of(made, made.jobs[1])) == 48
    h100 = document()
    h100["cluster"]["gpu"] = "h100"
    faster = scenario.parse(h100)
    assert scenario.flops_of(faster, faster.jobs[0])[8] > scenario.flops_of(made, made.jobs[0])[8]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": GPT3}, "job small: its model fits on none of 1 to 64 GPUs in steps of 64"),
        ({"model": SEVEN_B | {"hidden_size": 4097}}, "job small: hidden_size 4097 is not a multiple"),
        ({"model": SEVEN_B | {"hidden_size": 0}}, "job small: hidden_size of model is 0: input should be greater"),
        ({"model": SEVEN_B | {"depth": 3}}, "job small: the key depth of model is unknown"),
    ],
)
def test_bad_models_get_one_clear_sentence(change: dict[str, Any], sentence: str) -> None:
    made = document(**change) | ({"granularity_gpus": 64} if "fits on none" in sentence else {})
    if "fits on none" in sentence:
        made["cluster"]["gpus_per_node"] = 1
        made["cluster"]["num_nodes"] = 64
    with pytest.raises(UserError, match=sentence):
        scenario.parse(made)


def test_a_present_size_beside_the_granularity_is_worth_something_too() -> None:
    made = scenario.parse(document(current_gpus=4, transition_s=1.0))
    (small, _) = scenario.demands_of(made)
    assert small.current_flops > 0
    assert 4 not in small.throughput_flops


def test_moving_costs_by_where_the_state_comes_from() -> None:
    by_source = {"replica": 60.0, "store": 900.0}

    def cost_s(**more: Any) -> float:
        return scenario.demands_of(scenario.parse(document(current_gpus=8, **more)))[0].transition_s

    assert cost_s(transition_s_from=by_source) == 60.0
    assert cost_s(transition_s_from=by_source, state_from="store") == 900.0
    assert cost_s(transition_s_from=by_source, state_from="peer_memory", transition_s=5.0) == 5.0
    assert cost_s(transition_s=5.0) == 5.0
    with pytest.raises(UserError, match="job small: transition_s is missing"):
        cost_s(transition_s_from=by_source, state_from="peer_memory")
    with pytest.raises(UserError, match="job small: state_from is 'tape'"):
        cost_s(transition_s=5.0, state_from="tape")
