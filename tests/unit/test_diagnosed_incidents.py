"""Which incidents are diagnosed when, from which logs, and what the journal keeps of it."""

from dataclasses import replace

import pytest

from unicron_lib.diagnosis.case import MAX_LOGS, RECENT_S, UNDER_WAY_S, Case, case_json, concluded, due, ranks_to_read
from unicron_lib.diagnosis.incidents import remembered
from unicron_lib.diagnosis.tails import packed_tail
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, PlanState
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure, Severity
from unicron_lib.domain.journal import fold
from unicron_lib.domain.plans import Plan, PlanKind
from unicron_lib.report import incident_markdown

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def failure(rank: int | None, *, node: str | None = "n1", kind: ErrorKind = ErrorKind.PROCESS_EXIT, **more: object) -> Failure:
    values = {"id": f"f-{node}-{rank}", "kind": kind, "method": DetectionMethod.PROCESS, "seen_at": 100.0, "job": "a"}
    return Failure(**values | {"generation": 3, "node": node, "rank": rank} | more)


def incident(*failures: Failure, **more: object) -> Incident:
    values = {"id": "inc-1", "kind": "process_exit", "severity": Severity.SEV2, "opened_at": 100.0, "updated_at": 100.0}
    return Incident(**values | {"failures": failures, "count": len(failures), "jobs": ("a",)} | more)


def state_of(*incidents: Incident, decided_at: float = 100.0) -> ClusterState:
    plan = Plan(id="p", kind=PlanKind.RESTART, incidents=("inc-1",), attempt=1, basis_seq=0, reason="r")
    plans = {"p": PlanState(plan=plan, decided_at=decided_at)}
    return ClusterState(incidents={it.id: it for it in incidents}, plans=plans)


CLOSED = incident(failure(1), status=IncidentStatus.CLOSED, closed_at=110.0)
PLANNED = incident(failure(1), status=IncidentStatus.PLANNED, plan="p")


@pytest.mark.parametrize(
    ("it", "now", "is_due"),
    [
        (incident(failure(1)), 1000.0, False),
        (PLANNED, 100.0 + UNDER_WAY_S, False),
        (PLANNED, 101.0 + UNDER_WAY_S, True),
        (CLOSED, 111.0, True),
        (CLOSED, 111.0 + RECENT_S, False),
        (replace(CLOSED, severity=None), 111.0, False),
        (replace(CLOSED, status=IncidentStatus.MERGED, merged_into="inc-2"), 111.0, False),
    ],
)
def test_an_incident_is_due_when_no_recovery_can_be_delayed_by_it(it: Incident, now: float, *, is_due: bool) -> None:
    assert due(state_of(it), now) == (("inc-1",) if is_due else ())


def test_the_log_of_the_root_cause_is_read_first_each_once_and_not_too_many() -> None:
    peers = [failure(rank, kind=ErrorKind.NCCL_REMOTE_ERROR, seen_at=50.0 + rank) for rank in range(2, 30)]
    root = failure(1, kind=ErrorKind.CUDA_ERROR)
    again = failure(1, id="again", seen_at=101.0)
    found = ranks_to_read(incident(*peers, root, again))
    assert [it.rank for it in found] == list(range(1, MAX_LOGS + 1))
    of_node = failure(None, id="node", job=None, node="n2", kind=ErrorKind.ECC_ERROR)
    there = failure(40, node="n2", kind=ErrorKind.CUDA_ERROR, seen_at=200.0)
    assert [it.rank for it in ranks_to_read(incident(*peers, of_node, there))][:2] == [40, 2]
    assert ranks_to_read(incident(failure(4, node=None))) == ()


def told(tmp_path, text: str, *, kind: str = "process_exit"):
    log = tmp_path / "g3-r1.log"
    log.write_text(text)
    logs = (replace(packed_tail(log), file=f"n1:{log}"),)
    case = Case(incident=replace(CLOSED, kind=kind), logs=logs)
    return concluded(case_json.validate_json(case_json.dump_json(case)), at=120.0)


def test_the_diagnosis_is_kept_with_its_incident_and_told_again(tmp_path) -> None:
    event = told(tmp_path, f"loading\n{ECC}\n")
    state = fold(state_of(CLOSED), event)
    kept = state.incidents["inc-1"]
    assert kept == replace(CLOSED, diagnosis=event)
    assert due(state, 121.0) == ()
    again = remembered(kept)
    assert again is not None
    assert (again.kind, again.source, again.evidence[0].number) == (ErrorKind.ECC_ERROR, "infrastructure", 2)
    assert again.evidence[0].file.endswith("g3-r1.log")
    assert again.evidence[0].text == ECC
    assert "the recovery took it for process_exit" in again.reason
    assert remembered(CLOSED) is None


def test_a_diagnosis_that_agrees_does_not_speak_of_a_contradiction(tmp_path) -> None:
    agreed = replace(CLOSED, kind="ecc_error", diagnosis=told(tmp_path, f"{ECC}\n", kind="ecc_error"))
    text = incident_markdown(state_of(agreed), "inc-1")
    assert "**ecc_error** (infrastructure)" in text
    assert "was not changed" not in text


def test_logs_that_say_nothing_leave_what_was_detected(tmp_path) -> None:
    event = told(tmp_path, "loading\nall is well\n")
    assert (event.kind, event.reason) == ("process_exit", "no log tells more than the recovery knew")


def test_a_diagnosis_of_an_incident_that_nobody_knows_changes_nothing(tmp_path) -> None:
    assert fold(ClusterState(), told(tmp_path, ECC)) == replace(ClusterState(), seq=0)
