"""Which failures are one incident: the root cause is answered once, its consequences are counted."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Dismiss, Respond, Wait
from unicron_lib.domain.cluster import MAX_FAILURES, IncidentStatus, NodeStatus
from unicron_lib.domain.events import IncidentDismissed
from unicron_lib.domain.failing import DEDUP_WINDOW_S
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import PlanKind
from unicron_lib.errors import IllegalTransition
from unicron_lib.report import incident_markdown


def six_nodes():
    """Job A on four nodes of two, job B on two others."""
    scene = Scene()
    for number in range(1, 7):
        scene.join(f"node-{number}")
    scene.submit("job-a", max_gpus=8, throughput_flops={6: 1.9e9, 8: 2.0e9})
    scene.submit("job-b", max_gpus=4, throughput_flops={2: 0.5e9, 4: 0.9e9})
    scene.settle()
    assert len(scene.state.jobs["job-a"].nodes) == 4
    return scene


def failures_of(scene):
    return [it for it in scene.state.incidents.values() if it.is_failure and it.status is not IncidentStatus.MERGED]


@pytest.mark.parametrize("first", [True, False], ids=["the cause is told first", "symptoms are told first"])
def test_one_broken_gpu_and_its_symptoms_on_every_node_are_one_incident(first):
    """PB10: Xid 79 on one node, then 200 Xid 45 on each node of the job: one node is isolated, no other job is touched."""
    scene = six_nodes()
    nodes, other = sorted(scene.state.jobs["job-a"].nodes), scene.state.jobs["job-b"]
    broken = nodes[1]

    def symptoms():
        for number in range(200):
            scene.now += 0.0001
            scene.fault(ErrorKind.OTHER, nodes[number % 4], symptom=True)

    if not first:
        symptoms()
    scene.fault(ErrorKind.GPU_LOST, broken)
    symptoms()
    (incident,) = failures_of(scene)
    assert (incident.kind, incident.node, incident.jobs) == (ErrorKind.GPU_LOST, broken, ("job-a",))
    respond = scene.decide()
    assert set(respond.quarantine) == {broken}
    scene.plan(respond)
    symptoms()
    scene.settle()
    symptoms()
    (incident,) = failures_of(scene)
    assert incident.count == 1 + 200 * (3 if first else 4)
    assert len(incident.failures) <= MAX_FAILURES
    assert [n.id for n in scene.state.nodes.values() if n.status is NodeStatus.QUARANTINED] == [broken]
    assert scene.state.jobs["job-b"] == other
    assert sum(p.finished_at is not None and incident.id in p.plan.incidents for p in scene.state.plans.values()) == 1
    assert f"{incident.count - MAX_FAILURES} more of them" in incident_markdown(scene.state, incident.id)


def test_twenty_events_of_one_node_are_one_incident():
    """PB62: 20 events of the same node within 5 s, some after its plan was made: one incident, one plan, 20 counted."""
    scene = running_pair()
    kinds = (ErrorKind.ECC_ERROR, ErrorKind.NVLINK_ERROR, ErrorKind.ECC_ERROR, ErrorKind.GPU_DRIVER_ERROR)
    for number in range(20):
        scene.now += 0.2
        scene.fault(kinds[number % 4], "node-2")
        if number == 11:
            scene.plan(scene.decide())
    scene.settle()
    (incident,) = failures_of(scene)
    assert (incident.count, incident.kind) == (20, ErrorKind.ECC_ERROR)
    assert sum(incident.id in plan.plan.incidents for plan in scene.state.plans.values()) == 1


def test_ten_events_of_five_nodes_are_five_incidents_and_all_are_answered():
    """PB45: nothing depends on how many flow runs Prefect starts for them."""
    scene = Scene()
    for number in range(1, 9):
        scene.join(f"node-{number}")
    scene.submit("job-a", max_gpus=16, throughput_flops={2: 1e9, 4: 2e9, 6: 3e9, 16: 8e9})
    scene.settle()
    for _ in range(2):
        for number in range(1, 6):
            scene.lose(f"node-{number}")
    assert [(it.kind, it.count) for it in failures_of(scene)] == [(ErrorKind.NODE_LOST, 2)] * 5
    scene.note(scene.decide())  # more than half at once trips the breaker, but lost is lost
    respond = scene.decide()
    assert {it.id for it in failures_of(scene)} == set(respond.incidents)
    scene.settle()
    assert {it.status for it in failures_of(scene)} == {IncidentStatus.CLOSED}
    assert scene.state.jobs["job-a"].gpus == 6


def test_old_failures_of_a_node_that_is_back_change_nothing():
    """PB59: told again after the incident was closed and the node replaced, by whoever reads old records."""
    scene = running_pair()
    boot = scene.state.nodes["node-3"].boot
    scene.fault(ErrorKind.GPU_LOST, "node-1", symptom=True)
    scene.lose("node-3")
    scene.settle()
    scene.join("node-3")
    scene.settle()
    before = scene.state
    for kind in (ErrorKind.NODE_LOST, ErrorKind.GPU_LOST, ErrorKind.ECC_ERROR):
        scene.fault(kind, "node-3", boot=boot)
    assert (scene.state.nodes, scene.state.incidents) == (before.nodes, before.incidents)


def test_an_error_that_is_told_for_ever_is_answered_once():
    """PB06: the last Xid of a node is told on every poll, also after its incident is closed."""
    scene = running_pair()
    for _ in range(30):
        scene.now += 5
        scene.fault(ErrorKind.ILLEGAL_MEMORY_ACCESS, "node-2")
        scene.settle()
    (incident,) = failures_of(scene)
    assert incident.status is IncidentStatus.CLOSED
    assert sum(incident.id in plan.plan.incidents for plan in scene.state.plans.values()) == 1


def test_symptoms_without_a_cause_are_dismissed_and_touch_nobody():
    scene = running_pair()
    jobs = scene.state.jobs
    scene.fault(ErrorKind.OTHER, "node-1", symptom=True)
    scene.fault(ErrorKind.OTHER, "node-2", symptom=True)
    assert isinstance(scene.decide(), Wait)
    scene.now += 1.1
    dismissed = scene.decide()
    assert isinstance(dismissed, Dismiss)
    scene.note(dismissed)
    (incident,) = failures_of(scene)
    assert (incident.status, incident.count) == (IncidentStatus.CLOSED, 2)
    assert "nothing but symptoms" in incident_markdown(scene.state, incident.id)
    scene.now += DEDUP_WINDOW_S - 1
    scene.fault(ErrorKind.OTHER, "node-1", symptom=True)
    assert [it.count for it in failures_of(scene)] == [3]
    scene.now += 2
    scene.fault(ErrorKind.OTHER, "node-1", symptom=True)
    assert len(failures_of(scene)) == 2
    assert scene.state.jobs == jobs


def test_a_rank_that_dies_is_not_excused_by_symptoms_of_its_node():
    scene = Scene()
    scene.join("node-1", num_gpus=8)
    scene.submit("job-a", max_gpus=4, weight=2.0)
    scene.submit("job-b", max_gpus=4)
    scene.settle()
    scene.fault(ErrorKind.OTHER, "node-1", symptom=True)
    dismissed = stale_dismissal(scene)
    scene.fail(ErrorKind.PROCESS_EXIT, "job-a", rank=1)
    (incident,) = failures_of(scene)
    assert (incident.kind, incident.jobs, incident.count) == (ErrorKind.PROCESS_EXIT, ("job-a",), 2)
    with pytest.raises(IllegalTransition, match="cannot be dismissed"):
        scene.tell(dismissed)
    respond = scene.decide()
    assert (respond.kind, respond.faulted) == (PlanKind.RESTART, ("job-a",))


def stale_dismissal(scene):
    scene.now += 1.1
    action = scene.decide()
    return IncidentDismissed(id="late", at=scene.now, incident=action.incident, reason=action.reason)


def test_a_graver_failure_of_the_same_node_makes_a_plan_in_the_making_out_of_date():
    scene = running_pair()
    scene.fault(ErrorKind.LINK_FLAPPING, "node-1")
    scene.fault(ErrorKind.GPU_LOST, "node-1")
    (incident,) = scene.state.open_incidents
    assert (incident.kind, incident.count) == (ErrorKind.GPU_LOST, 2)
    assert [it.merged_into for it in scene.state.incidents.values() if it.status is IncidentStatus.MERGED] == [incident.id]


def test_broken_hardware_of_two_nodes_is_never_one_incident():
    scene = running_pair()
    one, two = sorted(scene.state.jobs["gpt-a"].nodes)
    rank = next(rank for rank, slot in enumerate(scene.state.jobs["gpt-a"].assignment.slots) if slot.node == one)
    scene.fail(ErrorKind.ECC_ERROR, "gpt-a", rank=rank)
    scene.fault(ErrorKind.GPU_LOST, two)
    respond = scene.decide()
    assert isinstance(respond, Respond)
    assert set(respond.quarantine) == {one, two}


def test_a_flapping_link_alone_touches_nobody_but_explains_what_ranks_complain_about_later():
    scene = running_pair()
    job = scene.state.jobs["gpt-a"]
    link = max(job.nodes)
    scene.fault(ErrorKind.LINK_FLAPPING, link)
    dismissed = scene.decide()
    assert isinstance(dismissed, Dismiss)
    assert "no rank complains" in dismissed.reason
    scene.note(dismissed)
    scene.now += 60
    scene.stall("gpt-a", 0, ErrorKind.NCCL_TIMEOUT)
    (incident,) = failures_of(scene)
    assert (incident.kind, incident.node, incident.jobs) == (ErrorKind.LINK_FLAPPING, link, ("gpt-a",))
    assert isinstance(scene.decide(), Wait)
    scene.now += 5.1
    respond = scene.decide()
    assert (respond.kind, respond.faulted, respond.quarantine) == (PlanKind.REATTEMPT, ("gpt-a",), {})


def test_a_link_that_goes_on_flapping_costs_its_node():
    scene = running_pair()
    link = max(scene.state.jobs["gpt-a"].nodes)
    kinds = []
    for _ in range(3):
        scene.fault(ErrorKind.LINK_FLAPPING, link, symptom=True)
        scene.fail(ErrorKind.NCCL_TIMEOUT, "gpt-a", iteration=5)
        scene.now += 1.1
        respond = scene.decide()
        kinds.append(respond.kind)
        scene.plan(respond)
        scene.settle()
        scene.now += DEDUP_WINDOW_S + 1
    assert kinds == [PlanKind.REATTEMPT, PlanKind.RESTART, PlanKind.REALLOCATE]
    assert scene.state.nodes[link].status is NodeStatus.QUARANTINED


def test_a_users_illegal_access_on_many_gpus_isolates_nobody_and_a_gpu_that_repeats_it_is_isolated():
    """PB11, the domain's side: symptoms on four GPUs and the ranks' own exceptions; then what repeats on one GPU."""
    scene = running_pair()
    for node in ("node-1", "node-2", "node-3", "node-4"):
        scene.fault(ErrorKind.ILLEGAL_MEMORY_ACCESS, node, symptom=True)
    scene.fail(ErrorKind.ILLEGAL_MEMORY_ACCESS, "gpt-a", rank=0)
    scene.fail(ErrorKind.ILLEGAL_MEMORY_ACCESS, "gpt-a", rank=3)
    respond = scene.decide()
    assert (respond.kind, respond.faulted, respond.quarantine) == (PlanKind.RESTART, ("gpt-a",), {})
    scene.settle()
    scene.fault(ErrorKind.ILLEGAL_MEMORY_ACCESS, "node-2", evidence="Xid 31 on GPU 0 for the third time within 1 h")
    respond = scene.decide()
    assert (respond.kind, set(respond.quarantine)) == (PlanKind.REALLOCATE, {"node-2"})
    scene.settle()
    told = [it for it in failures_of(scene) if it.node == "node-2" and it.plan][-1]
    assert "third time" in incident_markdown(scene.state, told.id)


@pytest.mark.parametrize("when", ["during the answer to the first", "with a clock that was set back"])
def test_the_loss_of_a_nodes_next_life_is_news(when):
    scene = running_pair()
    job = next(iter(scene.state.jobs))
    node = min(scene.state.jobs[job].nodes)
    scene.lose(node)
    if when == "during the answer to the first":
        scene.now += 2.0
        scene.plan(scene.decide())
    else:
        scene.settle()
    scene.join(node)
    if when != "during the answer to the first":
        scene.settle()
        scene.now -= 1000.0
    scene.lose(node)
    assert scene.state.nodes[node].status is NodeStatus.LOST
    assert len([i for i in failures_of(scene) if i.kind == ErrorKind.NODE_LOST]) == 2
    scene.now += 2000.0
    scene.settle()
    assert not any(node in it.nodes for it in scene.state.jobs.values())
    assert all(it.gpus for it in scene.state.jobs.values())
