"""What to do when a node is lost: the alternatives, their figures, and which of them wins when."""

import math
import random
import time
from dataclasses import replace

import pytest
from scenes import running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.events import PlanDecided
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import Alternative, AlternativeKind
from unicron_lib.errors import UserError
from unicron_lib.journal import state_json
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.alternatives import Loss, Outlook, compare
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.pools import no_solver
from unicron_lib.planning.waf import Demand
from unicron_lib.report import incident_markdown

WAIT, SHRINK, TAKE, REPLACE = AlternativeKind
TABLE = {8: 1.0e15, 16: 1.9e15, 24: 2.7e15, 32: 3.4e15}
A = Demand(job="gpt-a", throughput_flops=TABLE, current_gpus=32, current_flops=3.4e15, faulted=True, transition_s=100)
B = Demand(job="gpt-b", throughput_flops=TABLE, current_gpus=32, current_flops=3.4e15, transition_s=100)
LOSS = Loss(demands=(A, B), num_gpus=56, lost_gpus=8, num_nodes=7, lost_nodes=1, mtbf_gpu_s=5.6e6)
HORIZON_S = 1e5
OUTLOOK = Outlook(repair_s=3600.0, replace_s=300.0, node_dollars_per_h=30.0)


def share(request: Request) -> Allocation:
    return allocate(request, timer=time.perf_counter, solve=no_solver)


def found(loss: Loss = LOSS, outlook: Outlook = OUTLOOK) -> dict[AlternativeKind, Alternative]:
    return {it.kind: it for it in compare(loss, outlook, share=share)}


def best(loss: Loss = LOSS, outlook: Outlook = OUTLOOK) -> AlternativeKind:
    (only,) = (it.kind for it in compare(loss, outlook, share=share) if it.best)
    return only


def random_loss(seed: int) -> Loss:
    dice = random.Random(seed)
    demands = []
    for number in range(dice.randint(1, 5)):
        table = {size: 1e14 * size ** dice.uniform(0.7, 1.0) for size in range(4, 33, 4)}
        held = dice.choice((0, 8, 16))
        demands.append(
            Demand(
                job=f"job-{number}",
                throughput_flops=table,
                current_gpus=held,
                current_flops=table.get(held, 0.0),
                weight=dice.choice((0.5, 1.0, 2.0)),
                transition_s=dice.choice((10.0, 300.0)),
            )
        )
    running = [number for number, demand in enumerate(demands) if demand.current_gpus]
    for number in running[:1]:
        demands[number] = replace(demands[number], faulted=True)
    healthy = max(0, sum(demand.current_gpus for demand in demands) - 8) + dice.choice((0, 8))
    return Loss(demands=tuple(demands), num_gpus=healthy, lost_gpus=8, num_nodes=healthy // 8, lost_nodes=1, mtbf_gpu_s=1e6)


def test_the_figures_of_each_alternative_by_hand() -> None:
    ways = found()
    again = 3.4e15 * 100
    assert ways[WAIT].gpus == {"gpt-a": 0, "gpt-b": 32}
    assert ways[WAIT].flop == pytest.approx(3.4e15 * HORIZON_S + 3.4e15 * (HORIZON_S - 3600) - again)
    assert ways[SHRINK].gpus == {"gpt-a": 24, "gpt-b": 32}
    shrunk = 3.4e15 * HORIZON_S + 2.7e15 * 3600 + 3.4e15 * (HORIZON_S - 3600) - again - 2.7e15 * 100
    assert ways[SHRINK].flop == pytest.approx(shrunk)
    assert ways[TAKE].flop == pytest.approx(ways[SHRINK].flop)
    assert ways[REPLACE].flop == pytest.approx(
        3.4e15 * HORIZON_S + 3.4e15 * (HORIZON_S - 300) - again + 2.7e15 * 300 - 2.7e15 * 100
    )
    hours = HORIZON_S / 3600
    assert ways[WAIT].dollars == pytest.approx(30 * (7 * hours + hours - 1))
    assert ways[REPLACE].dollars == pytest.approx(30 * (8 * hours - 300 / 3600))


def test_a_short_repair_is_waited_for_and_a_long_one_is_not() -> None:
    slow = replace(OUTLOOK, replace_s=9e4)
    assert best(outlook=replace(slow, repair_s=10.0)) is WAIT
    assert best(outlook=replace(slow, repair_s=3600.0)) is SHRINK


def test_a_replacement_wins_unless_it_is_too_dear() -> None:
    far = replace(OUTLOOK, repair_s=9e4, dollars_per_eflop=20.0)
    assert best(outlook=far) is REPLACE
    assert best(outlook=replace(far, replacement_dollars_per_h=300.0)) is SHRINK


def test_gpus_are_taken_from_a_job_that_matters_less() -> None:
    precious = replace(LOSS, demands=(replace(A, weight=10.0), replace(B, weight=0.1)))
    never = replace(OUTLOOK, repair_s=1e6, replace_s=1e6)
    ways = found(precious, never)
    assert best(precious, never) is TAKE
    assert ways[TAKE].gpus == {"gpt-a": 32, "gpt-b": 24}
    assert "gpt-b 32 -> 24, gpt-a on other nodes until the next failure" in ways[TAKE].reason


def test_a_spare_node_means_that_nobody_has_to_wait() -> None:
    spare = replace(LOSS, num_gpus=64, num_nodes=8)
    ways = found(spare)
    assert ways[SHRINK].gpus == {"gpt-a": 32, "gpt-b": 32}
    assert best(spare) is SHRINK


@pytest.mark.parametrize("seed", range(12))
def test_taking_is_never_worse_than_shrinking_and_a_later_repair_never_better(seed: int) -> None:
    loss = random_loss(seed)
    early, late = (found(loss, replace(OUTLOOK, repair_s=seconds)) for seconds in (100.0, 5000.0))
    for ways in (early, late):
        assert SHRINK not in ways or ways[TAKE].flop >= ways[SHRINK].flop * (1 - 1e-9)
        assert sum(it.best for it in ways.values()) == 1
        top = max(it.flop for it in ways.values())
        assert all(it.flop == top for it in ways.values() if it.best)
        assert all(sum(it.gpus.values()) <= loss.num_gpus for it in ways.values())
    assert WAIT not in late or late[WAIT].flop <= early[WAIT].flop * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seconds", [0.0, 1e-3, 1e12])
def test_repairs_at_once_and_never_are_priced_too(seed: int, seconds: float) -> None:
    loss = random_loss(seed)
    ways = found(loss, replace(OUTLOOK, repair_s=seconds, replace_s=seconds))
    assert all(math.isfinite(it.flop) for it in ways.values())
    if seconds > loss.horizon_s:
        alone = share(Request(demands=loss.demands, num_gpus=loss.num_gpus, mtbf_gpu_s=loss.mtbf_gpu_s))
        assert ways[TAKE].flop == pytest.approx(alone.gain)
        assert ways[TAKE].gpus == alone.gpus


def test_what_cannot_be_done_is_not_offered() -> None:
    """Another job has lost GPUs too: it can neither be left alone, nor is there anything to wait for."""
    full = replace(LOSS, num_gpus=24, num_nodes=3)
    assert set(found(full)) == {TAKE, REPLACE}
    nothing = replace(LOSS, num_gpus=0, num_nodes=0)
    assert set(found(nothing)) == {TAKE, REPLACE}


def test_jobs_that_must_run_and_do_not_fit_wait_too() -> None:
    tight = replace(LOSS, demands=tuple(replace(d, must_run=True) for d in LOSS.demands), num_gpus=8, num_nodes=1)
    assert sum(found(tight)[TAKE].gpus.values()) == 8


def test_without_prices_the_flop_decide_and_among_equals_the_least_disturbance() -> None:
    free = Outlook(repair_s=1e9, replace_s=1e9)
    assert best(outlook=free) is SHRINK
    ways = found(outlook=free)
    assert all(it.dollars == 0.0 for it in ways.values())
    assert "as many FLOP, but it disturbs more" in ways[TAKE].reason


@pytest.mark.parametrize("figure", [-1.0, math.nan, math.inf])
def test_an_outlook_refuses_what_is_no_time_or_price(figure: float) -> None:
    with pytest.raises(UserError, match="repair_s is"):
        Outlook(repair_s=figure, replace_s=1.0)
    with pytest.raises(UserError, match="dollars_per_eflop is"):
        Outlook(repair_s=1.0, replace_s=1.0, dollars_per_eflop=figure)


def test_a_plan_for_a_lost_node_tells_its_alternatives_and_explain_shows_them() -> None:
    scene = running_pair()
    scene.lose("node-1")
    scene.now += 5
    action = scene.decide()
    assert isinstance(action, Respond)
    settings = {"measured": {}, "mtbf_gpu_s": 6.2e7, "granularity_gpus": 2, "timer": time.perf_counter}
    plain = make_plan(scene.state, action, **settings)  # type: ignore[arg-type]
    plan = make_plan(scene.state, action, outlook=OUTLOOK, **settings)  # type: ignore[arg-type]
    assert (plain.alternatives, plain.id) == ((), plan.id)
    ways = {it.kind: it for it in plan.alternatives}
    assert set(ways) == set(AlternativeKind)
    assert ways[TAKE].gpus == dict(plan.gpus)
    never = make_plan(scene.state, action, outlook=replace(OUTLOOK, repair_s=1e9, replace_s=1e9), **settings)  # type: ignore[arg-type]
    assert never.reason == plain.reason
    scene.tell(PlanDecided(id=plan.id, at=scene.now, plan=plan, supersedes=None))
    assert state_json.validate_json(state_json.dump_json(scene.state)).plans[plan.id].plan.alternatives == plan.alternatives
    (incident,) = plan.incidents
    told = incident_markdown(scene.state, incident)
    assert "## Alternatives" in told
    assert "| **best** replace |" in told
    assert "Better still, if it can be done: replace, " in plan.reason


def test_a_crashed_rank_has_no_alternatives() -> None:
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    scene.now += 5
    action = scene.decide()
    assert isinstance(action, Respond)
    plan = make_plan(scene.state, action, measured={}, mtbf_gpu_s=6.2e7, outlook=OUTLOOK, timer=time.perf_counter)
    assert plan.alternatives == ()
