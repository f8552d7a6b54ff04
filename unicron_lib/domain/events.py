"""What can happen: the entries of the journal, in the past tense.

Every event has an `id` that derives from its cause (journalled at most once under that id), and `at`, the wall clock of
its writer in epoch seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unicron_lib.domain.checked import Checked
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.failures import Failure
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.plans import Plan
from unicron_lib.domain.rank_done import RankDone

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent dialled in; `boot` is new in every life of the agent.

    A node that comes and goes gets no ranks before `snoozed_until` (epoch seconds; 0: at once).
    """

    id: str
    at: float
    node: str
    boot: str
    address: str
    num_gpus: int
    rack: str = ""
    pool: str = ""
    gpu_model: str = ""
    snoozed_until: float = 0.0
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
    """The quarantine of a node is over: an operator said so, or, with a `reason`, a node check cleared it."""

    id: str
    at: float
    node: str
    reason: str = ""
    type: Literal["node_released"] = "node_released"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuarantined:
    """A person isolated a node by hand; neither a breaker nor its next life takes it back."""

    id: str
    at: float
    node: str
    reason: str
    type: Literal["node_quarantined"] = "node_quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettled:
    """A node that came and went has stayed for its whole snooze: it may get ranks again."""

    id: str
    at: float
    node: str
    boot: str
    type: Literal["node_settled"] = "node_settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNoted:
    """Something about a node that a person should know and that is no failure; with `active` False it is over.

    `code` is one word for it, such as `gpu_blind`; a node has at most one note of a code.
    """

    id: str
    at: float
    node: str
    boot: str
    code: str
    text: str
    active: bool
    type: Literal["node_noted"] = "node_noted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A rank that had stood still goes on by itself (all of them if `rank` is None): its hang is over."""

    id: str
    at: float
    job: str
    generation: int
    iteration: int
    rank: int | None = None
    type: Literal["job_resumed"] = "job_resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerDetected:
    """A job is slowed down: by `rank`, which needs `ratio` times what the others need, or as a whole if `rank` is None."""

    id: str
    at: float
    job: str
    generation: int
    ratio: float
    reason: str
    rank: int | None = None
    node: str | None = None
    type: Literal["straggler_detected"] = "straggler_detected"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCleared:
    """It is as fast as the others, or as before, again."""

    id: str
    at: float
    job: str
    generation: int
    rank: int | None = None
    type: Literal["straggler_cleared"] = "straggler_cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpiked:
    """Loss and gradient norm left, with `iteration`, what they were: it may pass. With `over` it did, with that iteration."""

    id: str
    at: float
    job: str
    generation: int
    iteration: int
    reason: str
    over: bool = False
    type: Literal["loss_spiked"] = "loss_spiked"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentDismissed:
    """Nothing has to be done about an incident, or nothing may, since the breaker forbids it."""

    id: str
    at: float
    incident: str
    reason: str
    type: Literal["incident_dismissed"] = "incident_dismissed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerTripped:
    """Too many nodes were to be isolated within a short time: none is any more, until a person has looked."""

    id: str
    at: float
    reason: str
    type: Literal["breaker_tripped"] = "breaker_tripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerReset:
    """A person has looked: nodes may be isolated again, and those at once whose isolation the breaker forbade.

    If that was a `false_alarm`, those are left alone.
    """

    id: str
    at: float
    false_alarm: bool = False
    type: Literal["breaker_reset"] = "breaker_reset"


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
    """A job achieved `flops` FLOP/s on `num_gpus` GPUs in `pool`, with replicas of `shape`, clearly more than known before."""

    id: str
    at: float
    job: str
    submission: str
    num_gpus: int
    flops: float
    pool: str = ""
    shape: str = ""
    type: Literal["throughput_measured"] = "throughput_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceDue:
    """While all was quiet, it was found that moving jobs between pools pays: `gain` FLOP until the next failure."""

    id: str
    at: float
    gain: float
    reason: str
    type: Literal["rebalance_due"] = "rebalance_due"


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
    | NodeQuarantined
    | NodeSettled
    | NodeNoted
    | LeaveAnnounced
    | Checked
    | JobResumed
    | StragglerDetected
    | StragglerCleared
    | LossSpiked
    | IncidentDismissed
    | IncidentDiagnosed
    | BreakerTripped
    | BreakerReset
    | FailureDetected
    | JobSubmitted
    | ThroughputMeasured
    | RebalanceDue
    | RankDone
    | JobFinished
    | JobCancelled
    | PlanDecided
    | StepCompleted
    | RecoveryCompleted
    | FaultInjected
)
