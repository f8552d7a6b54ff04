"""What `unicron bench recovery` counts as lost of the survivors' work, by what a recovery tells of it."""

import pytest

from unicron_lib.domain.cluster import ClusterState, Incident, PlanState
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.failures import Severity
from unicron_lib.domain.plans import Plan, PlanKind, Step, StepKind
from unicron_lib.local.recovery_trials import JOB, lost_as_told, lost_micro_batches

HELD = {"held": 3, "micro_batches": 8}


def lost(drain: dict[str, Scalar], resume: dict[str, Scalar], *, again: int = 0) -> int:
    """After a crash of one of four ranks, with four micro-batches each."""
    steps = tuple(Step(id=kind.value, kind=kind, job=JOB.job, generation=2) for kind in (StepKind.DRAIN, StepKind.RESUME))
    plan = Plan(id="p", kind=PlanKind.RESTART, incidents=("i",), attempt=1, basis_seq=1, reason="", steps=steps)
    results = {StepKind.DRAIN.value: drain, StepKind.RESUME.value: resume}
    incident = Incident(id="i", kind="process_exit", severity=Severity.SEV2, opened_at=1.0, updated_at=1.0, plan="p")
    state = ClusterState(plans={"p": PlanState(plan=plan, decided_at=1.0, results=results)}, incidents={"i": incident})
    return lost_as_told(state, incident, again, ranks_lost=1)


@pytest.mark.parametrize("discarded", [0, 3])
def test_it_is_what_ranks_that_live_on_tell_and_whole_iterations(discarded: int) -> None:
    """A rank that was behind kept nothing: that says nothing of what is lost."""
    resume = {"kept_micro_batches": 8, "discarded_micro_batches": discarded}
    assert lost(HELD, resume) == discarded
    assert lost(HELD, resume, again=2) == 24 + discarded


@pytest.mark.parametrize(
    ("drain", "resume"),
    [
        ({"source": "the newest checkpoint"}, {"discarded_micro_batches": 0}),
        ({"held": 2}, {"discarded_micro_batches": 0}),
        (HELD, {"kept_micro_batches": 8}),
        (HELD, {}),
    ],
)
def test_what_is_not_told_and_what_ended_with_its_process_is_lost(drain: dict[str, Scalar], resume: dict[str, Scalar]) -> None:
    assert lost(drain, resume) == lost_micro_batches(0, ranks_lost=1) == 12
