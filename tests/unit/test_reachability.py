"""Layouts that a job's state can be loaded into (known failure PB38), and that plans keep to them."""

import time
from dataclasses import replace

import pytest

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Assignment, Layout, Plan, PlanKind
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.reachability import CheckpointFormat, reachable

DP_ONLY, FULLY = CheckpointFormat.DP_RESHARDABLE, CheckpointFormat.FULLY_RESHARDABLE
SAVED = Layout(tp=2, pp=1, dp=2)
OTHER = Layout(tp=1, pp=2, dp=1)


def test_state_for_data_parallelism_only_cannot_change_tp_and_pp() -> None:
    """PB38: saved with tp=2 pp=1 dp=2, the cheapest plan after a loss is tp=1 pp=2."""
    said = reachable(OTHER, DP_ONLY, None, saved=SAVED)
    assert said == "tp=1 pp=2 is reachable only with a checkpoint that is fully_reshardable: the state is of tp=2 pp=1"


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("checkpoint_format", CheckpointFormat)
def test_dp_may_always_change(dp: int, checkpoint_format: CheckpointFormat) -> None:
    assert reachable(Layout(tp=2, dp=dp), checkpoint_format, None, saved=SAVED) is None
    assert reachable(Layout(tp=2, dp=dp), checkpoint_format, SAVED) is None


def test_fully_reshardable_state_goes_anywhere() -> None:
    assert reachable(OTHER, FULLY, None, saved=SAVED) is None


def test_a_new_job_may_begin_in_any_layout() -> None:
    assert reachable(OTHER, DP_ONLY, None) is None


def test_live_ranks_alone_carry_no_state_into_another_layout() -> None:
    assert "fully_reshardable" in (reachable(OTHER, FULLY, SAVED) or "")


def test_live_ranks_help_where_the_checkpoint_does_not() -> None:
    assert reachable(OTHER, DP_ONLY, OTHER, saved=SAVED) is None


def plan_after_loss(state: ClusterState, formats: dict[str, CheckpointFormat]) -> Plan:
    respond = Respond(kind=PlanKind.REALLOCATE, incidents=("i",), attempt=1, reason="a node is lost", faulted=("a",))
    return make_plan(
        state, respond, measured={}, mtbf_gpu_s=6.2e7, checkpoint_formats=formats, time_limit_s=5.0, timer=time.perf_counter
    )


@pytest.fixture
def tensor_parallel() -> ClusterState:
    """A job of tp=2 dp=2 on two nodes, one of which is lost; on 2 GPUs it would be split into stages instead."""
    ways = (
        ParallelLayout(tensor_model_parallel_size=2, throughput_flops={4: 2e9}),
        ParallelLayout(pipeline_model_parallel_size=2, throughput_flops={2: 1e9}),
    )
    nodes = [Node(id=f"n{i}", boot="b", address="x", num_gpus=2) for i in range(3)]
    slots = (*nodes[0].slots, *nodes[1].slots)
    job = JobState(
        spec=JobSpec(job="a", min_gpus=2, parallel_layouts=ways),
        status=JobStatus.RUNNING,
        generation=1,
        assignment=Assignment(job="a", generation=1, layout=SAVED, slots=slots),
    )
    lost = replace(nodes[0], status=NodeStatus.LOST)
    return ClusterState(nodes={node.id: node for node in (lost, *nodes[1:])}, jobs={"a": job})


def test_a_plan_keeps_to_layouts_that_the_state_can_be_loaded_into(tensor_parallel: ClusterState) -> None:
    two = replace(tensor_parallel, nodes={name: node for name, node in tensor_parallel.nodes.items() if name != "n2"})
    assert plan_after_loss(two, {}).gpus == {"a": 2}
    plan = plan_after_loss(two, {"a": DP_ONLY})
    assert plan.gpus == {"a": 0}
    assert "a keeps to layouts that can load its state: tp=1 pp=2 is reachable only with a checkpoint" in plan.reason


def test_tensor_parallel_groups_stay_within_nodes(tensor_parallel: ClusterState) -> None:
    (assignment,) = plan_after_loss(tensor_parallel, {"a": DP_ONLY}).assignments
    nodes = [slot.node for slot in assignment.slots]
    assert nodes == ["n1", "n1", "n2", "n2"]
