"""What can happen: the entries of the journal, in the past tense.

Every event has an `id` that derives from its cause (journalled at most once under that id), and `at`, the wall clock of
its writer in epoch seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unicron_lib.domain.failures import Failure
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Plan

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent dialled in; `boot` is new in every life of the agent."""

    id: str
    at: float
    node: str
    boot: str
    address: str
    num_gpus: int
    rack: str = ""
    type: Literal["node_joined"] = "node_joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSuspected:
    """A node's connection broke or went silent: not yet a failure."""

    id: str
    at: float
    node: str
    boot: str
    reason: str
    type: Literal["node_suspected"] = "node_suspected"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCleared:
    """A suspected node is back, in the same life, before it counted as lost."""

    id: str
    at: float
    node: str
    boot: str
    type: Literal["node_cleared"] = "node_cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased:
    """An operator ended the quarantine of a node."""

    id: str
    at: float
    node: str
    type: Literal["node_released"] = "node_released"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDetected:
    """Something was seen and classified."""

    id: str
    at: float
    failure: Failure
    type: Literal["failure_detected"] = "failure_detected"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A train flow began; `submission` is new in each submission of the same name."""

    id: str
    at: float
    submission: str
    spec: JobSpec
    type: Literal["job_submitted"] = "job_submitted"


def submitted(spec: JobSpec, *, submission: str, at: float) -> JobSubmitted:
    """The event of a submission, the same whoever journals it first: the command or the train run."""
    return JobSubmitted(id=f"submitted/{spec.job}/{submission}", at=at, submission=submission, spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputMeasured:
    """A job was seen to achieve `flops` FLOP/s on `num_gpus` GPUs, clearly more than known before."""

    id: str
    at: float
    job: str
    submission: str
    num_gpus: int
    flops: float
    type: Literal["throughput_measured"] = "throughput_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """All ranks of a generation completed `train_iters`."""

    id: str
    at: float
    job: str
    generation: int
    iteration: int
    type: Literal["job_finished"] = "job_finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """A user asked for the end of a job."""

    id: str
    at: float
    job: str
    submission: str
    type: Literal["job_cancelled"] = "job_cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecided:
    """A plan answers its incidents; from here on only its generations may act."""

    id: str
    at: float
    plan: Plan
    supersedes: str | None = None
    type: Literal["plan_decided"] = "plan_decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """A step of a plan had its effect; `id` is the step's id, `result` what later steps need."""

    id: str
    at: float
    plan: str
    result: Mapping[str, Scalar] = field(default_factory=dict)
    type: Literal["step_completed"] = "step_completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCompleted:
    """All steps of a plan are done; its incidents are closed."""

    id: str
    at: float
    plan: str
    type: Literal["recovery_completed"] = "recovery_completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """`unicron inject` or the demo did harm on purpose: the zero of an incident's clock."""

    id: str
    at: float
    kind: str
    target: str
    type: Literal["fault_injected"] = "fault_injected"


Event = (
    NodeJoined
    | NodeSuspected
    | NodeCleared
    | NodeReleased
    | FailureDetected
    | JobSubmitted
    | ThroughputMeasured
    | JobFinished
    | JobCancelled
    | PlanDecided
    | StepCompleted
    | RecoveryCompleted
    | FaultInjected
)
