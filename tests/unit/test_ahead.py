"""Plans made ahead: what the table answers is what a fresh solve answers, and what happens next is in it."""

import time
from functools import partial

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import Plan
from unicron_lib.planning.ahead import METHOD, Solve, Table, likely, next_steps
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.planner import make_plan

fresh = partial(allocate, timer=time.perf_counter)


def plan_of(state: ClusterState, respond: Respond, solve: Solve) -> Plan:
    return make_plan(state, respond, measured={}, mtbf_gpu_s=6.2e7, granularity_gpus=2, timer=time.perf_counter, solve=solve)


def foreseen(scene: Scene) -> Table:
    table = Table(fresh, timer=time.perf_counter)
    assert table.foresee(scene.state, plan_of, go_on=lambda: True) == len(list(next_steps(scene.state)))
    assert len(table)
    return table


def refuse(request: Request) -> Allocation:
    raise AssertionError(f"was not foreseen: {request}")


@pytest.mark.parametrize("node", ["node-1", "node-3"])
def test_a_node_loss_is_answered_from_the_table_as_by_a_fresh_solve(node: str) -> None:
    scene = running_pair()
    table = foreseen(scene)
    scene.lose(node)
    scene.now += 10.0
    action = scene.decide()
    assert isinstance(action, Respond)
    table._solve = refuse
    plan, solved = (plan_of(scene.state, action, solve) for solve in (table.answer, fresh))
    assert plan.method == METHOD
    assert (table.lookups, table.hits) == (1, 1)
    assert (plan.gpus, plan.gain, plan.assignments, plan.id) == (solved.gpus, solved.gain, solved.assignments, solved.id)
    assert plan.optimal


def test_a_node_that_joins_and_a_job_that_ends_are_foreseen() -> None:
    scene = running_pair()
    scene.lose("node-2")
    scene.settle()
    for change in (lambda: scene.finish("gpt-b"), lambda: scene.join("node-2")):
        table = foreseen(scene)
        change()
        scene.now += 10.0
        action = scene.decide()
        assert isinstance(action, Respond)
        assert plan_of(scene.state, action, table.answer).method == METHOD
        scene.settle()


def test_what_nobody_foresaw_is_solved() -> None:
    scene = running_pair()
    table = foreseen(scene)
    scene.lose("node-1")
    scene.lose("node-3")
    scene.now += 10.0
    action = scene.decide()
    assert isinstance(action, Respond)
    plan = plan_of(scene.state, action, table.answer)
    assert (plan.method != METHOD, plan.optimal, table.hits) == (True, True, 0)


def test_each_next_step_is_decided_and_nodes_that_hold_the_same_stand_for_each_other() -> None:
    scene = running_pair()
    events = list(likely(scene.state))
    lost = [event.failure.node for event in events if event.type == "failure_detected"]
    assert sorted(lost) == sorted(2 * [lost[0], lost[1]])
    assert len(list(next_steps(scene.state))) == len(events)
    assert {event.failure.kind for event in events if event.type == "failure_detected"} == {
        ErrorKind.NODE_LOST,
        ErrorKind.ECC_ERROR,
    }


def test_a_spent_budget_leaves_the_rest_to_fresh_solves() -> None:
    table = Table(fresh, timer=time.perf_counter)
    assert table.foresee(running_pair().state, plan_of, go_on=lambda: False) == 0
    assert len(table) == 0
