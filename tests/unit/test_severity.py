"""From a failure to how far the answer goes: severities, escalation, and what a process itself asks for."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Dismiss
from unicron_lib.domain.failures import (
    BLAMELESS,
    DEFAULT_SEVERITY,
    ECHOES,
    EVIDENCE,
    DetectionMethod,
    ErrorKind,
    Failure,
    Severity,
)
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.judging import DEFAULT_POLICY, judge
from unicron_lib.domain.plans import PlanKind

KIND_OF_PLAN = {Severity.SEV3: PlanKind.REATTEMPT, Severity.SEV2: PlanKind.RESTART, Severity.SEV1: PlanKind.REALLOCATE}
RANKS_OWN = sorted(set(ErrorKind) - {ErrorKind.NODE_LOST, ErrorKind.USER_ERROR})


def failed_without_progress(kind, attempts):
    """The incident of a failure of which `attempts` restarts brought no new iteration."""
    scene = Scene()
    for number in range(1, 8):
        scene.join(f"node-{number}")
    scene.submit("gpt-a", max_gpus=8)
    scene.settle()
    for attempt in range(attempts + 1):
        scene.fail(kind, "gpt-a", rank=1, iteration=5)
        scene.now += 1.1
        (incident,) = scene.state.open_incidents
        if attempt < attempts:
            scene.plan(scene.decide())
            scene.settle()
    return scene, incident


@pytest.mark.parametrize("attempts", [0, 1, 2])
@pytest.mark.parametrize("kind", RANKS_OWN)
def test_each_attempt_without_a_new_iteration_raises_the_severity_by_one(kind, attempts):
    scene, incident = failed_without_progress(kind, attempts)
    verdict = judge(scene.state, incident, scene.now)
    base = DEFAULT_SEVERITY[kind]
    raised = max(base - attempts, Severity.SEV2 if kind in BLAMELESS | ECHOES else Severity.SEV1)
    assert verdict.severity == min(base, raised)
    isolates = verdict.severity is Severity.SEV1 and kind not in BLAMELESS
    assert bool(verdict.quarantine) == isolates
    assert scene.decide().kind is KIND_OF_PLAN[verdict.severity]
    assert f"{kind} on gpt-a rank 1" in verdict.reason


@pytest.mark.parametrize("kind", sorted(set(ErrorKind) - {ErrorKind.NODE_LOST}))
def test_what_is_told_of_a_node_isolates_it_or_touches_nobody(kind):
    scene = running_pair()
    scene.fault(kind, "node-1")
    scene.now += 1.1
    action = scene.decide()
    if kind in EVIDENCE:
        assert isinstance(action, Dismiss)
    else:
        assert (action.kind, set(action.quarantine)) == (PlanKind.REALLOCATE, {"node-1"})


@pytest.mark.parametrize(
    ("verdict", "isolates", "stops"), [("exclude", True, False), ("exclude_and_stop", True, True), ("stop", False, True)]
)
def test_a_process_may_ask_for_another_node_or_not_to_be_started_again(verdict, isolates, stops):
    """Exit codes 16, 17 and 93."""
    scene = running_pair()
    node = scene.fail(ErrorKind.CUDA_ERROR, "gpt-a", rank=2, verdict=verdict).node
    scene.now += DEFAULT_POLICY.last_word_s if stops else 0.0
    respond = scene.decide()
    assert respond.kind is PlanKind.REALLOCATE
    assert (set(respond.quarantine), set(respond.stop)) == ({node} if isolates else set(), {"gpt-a"} if stops else set())
    assert "ask" in respond.reason
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert job.status is (JobStatus.FAILED if stops else JobStatus.RUNNING)
    assert not isolates or node not in job.nodes


def test_what_a_process_asks_for_is_not_lost_among_its_peers_complaints():
    scene = running_pair()
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a", rank=0)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=2, verdict="stop")
    scene.now += DEFAULT_POLICY.last_word_s
    assert set(scene.decide().stop) == {"gpt-a"}


def test_the_order_of_causes():
    """Causes, links, complaints, symptoms; the graver, the certain, the rank's word on its own."""
    process, node = DetectionMethod.PROCESS, DetectionMethod.NODE_HEALTH
    best_first = [
        failure(ErrorKind.ECC_ERROR, node, job=None),
        failure(ErrorKind.ECC_ERROR, process),
        failure(ErrorKind.PROCESS_EXIT, process, seen_at=3.0),
        failure(ErrorKind.TASK_HANG, DetectionMethod.STATISTICS, seen_at=1.0, not_before=5.0),
        failure(ErrorKind.STORAGE_ERROR, process),
        failure(ErrorKind.LINK_FLAPPING, node, job=None),
        failure(ErrorKind.LINK_FLAPPING, node, job=None, symptom=True),
        failure(ErrorKind.NCCL_TIMEOUT, process),
        failure(ErrorKind.OTHER, node, job=None, symptom=True),
    ]
    assert [f.weight for f in best_first] == sorted(f.weight for f in best_first)


def failure(kind, method, **keys):
    return Failure(id="f", kind=kind, method=method, **{"seen_at": 1.0, "job": "gpt-a", **keys})


def test_echoes_are_never_what_a_stall_outside_a_collective_is_told_as():
    assert ErrorKind.TASK_HANG not in ECHOES
    assert ErrorKind.NCCL_TIMEOUT in ECHOES
