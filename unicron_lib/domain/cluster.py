"""The state of the cluster: what the journal folds to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.failures import ErrorKind, Failure, Severity, root_cause
from unicron_lib.domain.jobs import ENDED, JobState
from unicron_lib.domain.plans import Plan, Slot, StepKind

MAX_FAILURES = 64
"""So many failures of an incident are kept, the root cause and the newest, and the stall of each rank; all are counted."""


class NodeStatus(StrEnum):
    """READY nodes take ranks; a SUSPECT one is silent, but not judged yet; a SNOOZED one comes and goes too often.

    A LEAVING one has announced the end of its present life: its jobs move while it is still there.
    """

    READY = "ready"
    SUSPECT = "suspect"
    SNOOZED = "snoozed"
    LEAVING = "leaving"
    LOST = "lost"
    QUARANTINED = "quarantined"


BY_HAND = "isolated by a person"
"""How the reason of a quarantine begins that a person has ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node; `boot` names the life of its agent, `since` is when the status began, `rack` may be unknown ("").

    Nodes of one `pool` are alike: of one instance type, on demand or spot. A job uses one pool.
    `losses` are the times at which it was lost within the last hour; a SNOOZED one gets no ranks before `snoozed_until`.
    `notes` are what a person should know about its present life: code and text; `checked_at` is when it passed a node check.
    A LEAVING one is gone by `leaves_at`; a LOST one that `has_left` had announced it, and took nothing with it.
    """

    id: str
    boot: str
    address: str
    num_gpus: int
    status: NodeStatus = NodeStatus.READY
    since: float = 0.0
    reason: str = ""
    rack: str = ""
    pool: str = ""
    gpu_model: str = ""
    losses: tuple[float, ...] = ()
    snoozed_until: float = 0.0
    checked_at: float = 0.0
    leaves_at: float = 0.0
    has_left: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_isolated_by_hand(self) -> bool:
        """Whether a person isolated it: then no test gives it back."""
        return self.status is NodeStatus.QUARANTINED and self.reason.startswith(BY_HAND)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its GPUs."""
        return tuple(Slot(self.id, gpu) for gpu in range(self.num_gpus))


class IncidentStatus(StrEnum):
    """OPEN waits for a plan, PLANNED has one, CLOSED is over, MERGED turned out to be a part of another."""

    OPEN = "open"
    PLANNED = "planned"
    CLOSED = "closed"
    MERGED = "merged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything with one root cause: failures, or one planned change such as a node that joins.

    `kind` is an `ErrorKind` or the type of the planned event; `severity` is None for planned changes.
    `opened_at` is when its first event was journalled, `updated_at` when its root cause was, and
    `fault_at` is when the fault was injected, if it was. `count` failures were seen, of which `failures` holds the root
    cause and the newest, as the journal took them. `held` tells that the breaker forbade to isolate its node; if it is open
    nevertheless, a person has allowed it since. `diagnosis` comes later, beside the recovery. `launch_check` tells what a check
    of nodes before a first start has found, if it waited for one.
    """

    id: str
    kind: str
    severity: Severity | None
    opened_at: float
    updated_at: float
    fault_at: float | None = None
    failures: tuple[Failure, ...] = ()
    count: int = 0
    jobs: tuple[str, ...] = ()
    node: str | None = None
    status: IncidentStatus = IncidentStatus.OPEN
    plan: str | None = None
    closed_at: float | None = None
    merged_into: str | None = None
    note: str = ""
    held: bool = False
    diagnosis: IncidentDiagnosed | None = None
    launch_check: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether something broke, as opposed to a planned change."""
        return self.severity is not None

    @property
    def is_only_echoes(self) -> bool:
        """Whether nothing but symptoms has been seen so far."""
        return self.is_failure and all(failure.is_echo for failure in self.failures)

    @property
    def is_only_symptoms(self) -> bool:
        """Whether nodes have told of nothing but consequences of something else."""
        return self.is_failure and all(failure.symptom and failure.job is None for failure in self.failures)

    @property
    def is_of_nodes(self) -> bool:
        """Whether no job has failed: its ranks may still be at work."""
        return self.is_failure and all(failure.job is None for failure in self.failures)

    @property
    def may_pass(self) -> bool:
        """Whether ranks merely stand still, with at most a flapping link or symptoms to explain it."""
        standing = all(f.is_stall if f.job else f.symptom or f.kind is ErrorKind.LINK_FLAPPING for f in self.failures)
        return standing and not self.is_of_nodes

    @property
    def passes_by(self) -> float:
        """Until when (epoch s, the journal's clock) it may pass by itself; when it was seen, if it will not.

        The observer's patience counts from its own clock: clocks that differ must not hold us for long.
        """
        standing = [f for f in self.failures if f.is_stall]
        first = root_cause(standing)
        patience_s = first.not_before - first.seen_at if first and self.may_pass else 0.0
        return self.updated_at + max(patience_s, 0.0)

    @property
    def root(self) -> Failure | None:
        """The failure that explains the others."""
        return root_cause(self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """A plan and how far it got: results by step id."""

    plan: Plan
    decided_at: float
    results: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    finished_at: float | None = None
    superseded_by: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether its steps are still to be carried out."""
        return self.finished_at is None and self.superseded_by is None

    @property
    def drained(self) -> frozenset[str]:
        """The jobs whose ranks have parted from where they were, with their work safe."""
        return frozenset(step.job for step in self.plan.steps if step.kind is StepKind.DRAIN and step.id in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All that decisions look at. `seq` is the number of the last journal entry folded in.

    `breaker_since` is when the breaker stopped all isolation of nodes, None if it has not, and `breaker_reason` why.
    """

    seq: int = -1
    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    incidents: Mapping[str, Incident] = field(default_factory=dict)
    plans: Mapping[str, PlanState] = field(default_factory=dict)
    faults: Mapping[str, float] = field(default_factory=dict)
    breaker_since: float | None = None
    breaker_reason: str = ""

    @property
    def healthy_nodes(self) -> tuple[Node, ...]:
        """Nodes that may get ranks, in the order of their names."""
        return tuple(node for _, node in sorted(self.nodes.items()) if node.status is NodeStatus.READY)

    @property
    def num_healthy_gpus(self) -> int:
        """N' of the paper."""
        return sum(node.num_gpus for node in self.healthy_nodes)

    def pool_of(self, job: JobState) -> str:
        """The pool that the job's GPUs are in, "" for a job without any."""
        held = job.assignment.slots if job.assignment else ()
        return next((self.nodes[slot.node].pool for slot in held if slot.node in self.nodes), "")

    def jobs_on(self, node: str) -> tuple[str, ...]:
        """The jobs that train on the node."""
        return tuple(sorted(name for name, job in self.jobs.items() if node in job.nodes and job.status not in ENDED))

    def is_emptied(self, node: str) -> bool:
        """Whether nothing is lost with the node: the work of all jobs on it is safe, and the plan under way uses it no more."""
        active = self.active_plan
        drained = active.drained if active else frozenset()
        used = {slot.node for it in active.plan.assignments for slot in it.slots} if active else set()
        return node not in used and drained.issuperset(self.jobs_on(node))

    @property
    def active_plan(self) -> PlanState | None:
        """The plan whose transition runs now."""
        return next((plan for plan in self.plans.values() if plan.is_active), None)

    @property
    def open_incidents(self) -> tuple[Incident, ...]:
        """Incidents without a plan, oldest first."""
        waiting = (incident for incident in self.incidents.values() if incident.status is IncidentStatus.OPEN)
        return tuple(sorted(waiting, key=lambda incident: (incident.opened_at, incident.id)))

    def with_node(self, node: Node) -> "ClusterState":
        """The state with `node` added or replaced."""
        return replace(self, nodes={**self.nodes, node.id: node})

    def with_job(self, job: JobState) -> "ClusterState":
        """The state with `job` added or replaced."""
        return replace(self, jobs={**self.jobs, job.spec.job: job})

    def with_incident(self, incident: Incident) -> "ClusterState":
        """The state with `incident` added or replaced."""
        return replace(self, incidents={**self.incidents, incident.id: incident})

    def with_plan(self, plan: PlanState) -> "ClusterState":
        """The state with `plan` added or replaced."""
        return replace(self, plans={**self.plans, plan.plan.id: plan})
