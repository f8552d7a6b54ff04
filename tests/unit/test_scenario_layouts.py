"""`unicron plan` with jobs that name the layouts among which they may choose."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from unicron_lib.errors import UserError
from unicron_lib.planning.scenario import answer, parse
from unicron_lib.planning.whatif import job_to_launch

LINE, PIPE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 51200}
TABLES = [{**LINE, "throughput_flops": {2: 9.0, 4: 16.0}}, {"throughput_flops": {1: 4.0, 2: 7.0, 3: 10.0}}]


def plan(job: dict[str, Any], num_nodes: int = 1, gpus_per_node: int = 4, **cluster: object) -> dict[str, Any]:
    found = {"num_nodes": num_nodes, "gpus_per_node": gpus_per_node, "mtbf_gpu_s": 1e7, **cluster}
    return answer(parse({"cluster": found, "granularity_gpus": 1, "jobs": [{"job": "a", **job}]}), timer=lambda: 0.0)


@pytest.mark.parametrize(("most", "layout"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 3)), (4, (2, 1, 2))])
def test_of_tables_the_best_is_taken_on_each_number_of_gpus(most: int, layout: tuple[int, int, int]) -> None:
    found = plan({"parallel_layouts": TABLES, "max_gpus": most})
    assert (found["gpus"], tuple(found["layout"]["a"].values())) == ({"a": most}, layout)
    shown = "a runs in tp={} pp={} dp={}".format(*layout)
    assert shown in found["reason"]


def test_a_model_is_reckoned_through_in_the_named_layouts_only() -> None:
    model = {**MODEL, "global_batch_size": 64}
    free, bound = (
        plan({"model": model}),
        plan({"model": model, "parallel_layouts": [LINE, PIPE]}),
    )
    assert free["layout"]["a"] == {"tp": 1, "pp": 1, "dp": 4}
    assert bound["layout"]["a"] == {"tp": 2, "pp": 1, "dp": 2}
    assert bound["gain"] < free["gain"]
    assert "the best of 2 layouts on 4 GPUs by the model" in bound["reason"]
    assert "a runs in tp=1 pp=1 dp=4: the fastest by the model of all that fit on 4 GPUs" in free["reason"]


def test_what_was_measured_scales_the_model() -> None:
    job = {"model": {**MODEL, "global_batch_size": 64}, "parallel_layouts": [LINE]}
    assert plan({**job, "throughput_flops": {2: 1e9}})["gain"] < plan(job)["gain"]


def test_a_model_that_fits_in_none_of_them_is_told() -> None:
    big = {**MODEL, "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "global_batch_size": 64}
    with pytest.raises(UserError, match="its model fits on none of 1 to 4 GPUs"):
        plan({"model": big, "parallel_layouts": [LINE]})


def test_one_table_for_all_is_that_of_most_replicas() -> None:
    found = plan({"parallel_layouts": [LINE, PIPE], "throughput_flops": {1: 9.0, 2: 1.0, 4: 2.0}})
    assert (found["gpus"], found["layout"]["a"]) == ({"a": 4}, {"tp": 2, "pp": 1, "dp": 2})


@pytest.mark.parametrize("more", [{"throughput_flops": {2: 1.0}}, {"model": {**MODEL, "global_batch_size": 64}}])
def test_tables_are_given_once(more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="give throughput_flops to all of parallel_layouts"):
        plan({"parallel_layouts": TABLES, **more})
    with pytest.raises(UserError, match="give throughput_flops to all of parallel_layouts"):
        plan({"parallel_layouts": [TABLES[0], {}]})


def test_groups_of_tensor_parallelism_are_placed_on_one_node() -> None:
    nodes = {"n1": {"a": 2}, "n2": {}}
    cluster = {"num_nodes": 2, "gpus_per_node": 2, "mtbf_gpu_s": 1e7}
    job = {"job": "a", "current_gpus": 2, "transition_s": 1, "parallel_layouts": TABLES}
    found = answer(parse({"cluster": cluster, "granularity_gpus": 1, "nodes": nodes, "jobs": [job]}), timer=lambda: 0.0)
    assert found["placement"] == {"a": {"n1": 2, "n2": 2}}


def test_a_deployment_with_layouts_can_be_launched(tmp_path: Path) -> None:
    job = {"job": "a", "parallel_layouts": TABLES, "hidden_size": 64}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"deployments": [{"parameters": {"job": job}}]}))
    assert plan(job_to_launch(file) | {"max_gpus": 2})["layout"]["a"] == {"tp": 2, "pp": 1, "dp": 1}
