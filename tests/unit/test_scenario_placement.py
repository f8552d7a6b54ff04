"""`unicron plan` with the GPUs of each job on each node: the answer says where the ranks go."""

from collections import Counter
from typing import Any

import pytest

from unicron_lib.errors import UserError
from unicron_lib.planning import scenario, whatif


def document(**more: object) -> dict[str, Any]:
    table = {4: 4e12, 8: 7.9e12, 12: 11.7e12}
    jobs = [
        {"job": name, "current_gpus": 8, "min_gpus": 4, "transition_s": 60, "throughput_flops": table} for name in ("a", "b")
    ]
    return {
        "cluster": {"num_nodes": 3, "gpus_per_node": 8, "mtbf_gpu_s": 6e7},
        "granularity_gpus": 4,
        "nodes": {"n1": {"a": 8}, "n2": {"b": 8}},
        "jobs": jobs,
        **more,
    }


def answer(asked: scenario.Scenario) -> dict[str, Any]:
    return scenario.answer(asked, timer=lambda: 0.0)


def test_jobs_grow_where_they_are_and_onto_empty_nodes() -> None:
    found = answer(scenario.parse(document()))
    assert found["gpus"] == {"a": 12, "b": 12}
    assert found["placement"] == {"a": {"n1": 8, "(empty 1)": 4}, "b": {"n2": 8, "(empty 1)": 4}}
    assert found["moved_gpus"] == 8


def test_whoever_lost_a_node_moves_and_nobody_else() -> None:
    asked = whatif.changed(scenario.parse(document()), lose=["n1"])
    found = answer(asked)
    assert found["placement"]["b"]["n2"] == 8
    used = Counter(node for on in found["placement"].values() for node, gpus in on.items() for _ in range(gpus))
    assert set(used) == {"n2", "(empty 1)"}
    assert max(used.values()) <= 8


def test_a_limit_of_jobs_a_node_is_kept_and_said() -> None:
    found = answer(scenario.parse(document(max_jobs_per_node=1)))
    shared = Counter(node for on in found["placement"].values() for node in on)
    assert max(shared.values()) == 1
    assert "on 12 GPUs" in found["reason"]


def test_a_job_that_ends_leaves_its_nodes() -> None:
    asked = whatif.changed(scenario.parse(document()), finish=["a"])
    (on,) = answer(asked)["placement"].values()
    assert (on.pop("n2"), list(on.values())) == (8, [4])


def test_names_without_numbers_place_nothing() -> None:
    found = answer(scenario.parse(document(nodes={"n1": ["a"], "n2": ["b"]})))
    assert "placement" not in found


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"nodes": {"n1": {"a": 9}}}, "its jobs have 9 GPUs"),
        ({"nodes": {"n1": {"a": 8}, "n2": ["b"]}}, "numbers of GPUs on every node"),
        ({"nodes": {"n1": {"a": 8}, "n2": {"b": 4}}}, "job b: it has 4 GPUs under nodes"),
        ({"nodes": {"n1": {"c": 8}}}, "there is no job c"),
        ({"nodes": {}, "max_jobs_per_node": 1}, "max_jobs_per_node needs nodes"),
        ({"nodes": {"n1": {"a": 0}}}, "greater than or equal to 1"),
    ],
)
def test_mistakes_are_one_sentence(more: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        scenario.parse(document(**more))
