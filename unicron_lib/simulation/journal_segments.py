"""The segments of a production journal, so that the accounts of a real cluster are made as those of a simulated one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, Node, NodeStatus, PlanState
from unicron_lib.domain.events import Event, StepCompleted
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.journal import fold
from unicron_lib.domain.leave import ANNOUNCED
from unicron_lib.domain.plans import Plan, PlanKind, StepKind
from unicron_lib.planning import throughput
from unicron_lib.planning.layout_choice import Choice
from unicron_lib.planning.scene import current_slots, layout_now
from unicron_lib.simulation.accounting import Books, books
from unicron_lib.simulation.charges import Charges
from unicron_lib.simulation.ledger import Ledger, Segment
from unicron_lib.simulation.policy import Change
from unicron_lib.simulation.uses import Use

OUT = frozenset({NodeStatus.LOST, NodeStatus.QUARANTINED})

USES = {
    StepKind.DRAIN: Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION,
    StepKind.STOP: Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION,
    StepKind.RESTORE: Use.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME,
    StepKind.LAUNCH: Use.PROGRAM_STARTUP,
    StepKind.RESUME: Use.PROGRAM_STARTUP,
}
"""What a job does while this is its next step."""


@dataclass(slots=True)
class _Reader:
    """Folds the journal and turns the ledger whenever something about a job, or a node, is not as before."""

    state: ClusterState = field(default_factory=ClusterState)
    ledger: Ledger = field(default_factory=Ledger)
    outages: dict[str, tuple[float, str, int]] = field(default_factory=dict)
    charges: Charges = field(default_factory=Charges)
    capacity_gpu_s: float = 0.0
    counted_s: float | None = None

    def read(self, event: Event) -> None:
        at_s = event.at if self.counted_s is None else max(event.at, self.counted_s)
        self.pass_until(at_s)
        self.state = fold(self.state, event)
        for name, job in self.state.jobs.items():
            self._turn(name, job, event, at_s)
        for node in self.state.nodes.values():
            self._watch(node, at_s)

    def pass_until(self, at_s: float) -> None:
        """All GPUs that ever joined count, also those that are out of use."""
        passed_s = 0.0 if self.counted_s is None else at_s - self.counted_s
        self.capacity_gpu_s += passed_s * sum(node.num_gpus for node in self.state.nodes.values())
        self.counted_s = at_s

    def _turn(self, name: str, job: JobState, event: Event, at_s: float) -> None:
        change = self._of_job(name, job, event, at_s)
        before = self.ledger.now.get(name)
        if before is None or _content(before) != _content(change):
            # what was seen, or had begun, before it was journalled holds from then on
            self.ledger.turn(change, max(change.from_s, self.ledger.since.get(name, change.from_s)))

    def _of_job(self, name: str, job: JobState, event: Event, at_s: float) -> Change:
        slots = current_slots(job) if job.wants_gpus else ()
        gpus = sum(self.state.nodes[slot.node].status not in OUT for slot in slots)
        held = partial(Change, job=name, gpus=gpus, flops=0.0)
        incident = self._incident_of(name)
        active = self.state.active_plan
        step = _next_step(active, name)
        if step and active:
            cause = self._cause(active.plan)
            if cause in active.plan.incidents and active.plan.kind is PlanKind.REALLOCATE:
                self.charges.resized(name, cause)
            return held(from_s=at_s, use=USES[step], cause=cause)
        if incident and incident.status is IncidentStatus.OPEN:
            return held(from_s=_began(incident), use=USES[StepKind.DRAIN], cause=incident.id)
        if not slots:
            cause = self.charges.due(name, 0, is_whole=False) if job.wants_gpus else ""
            return held(from_s=at_s, use=USES[StepKind.DRAIN] if cause else Use.OTHER, cause=cause)
        resumed = event.result.get("first_iteration_at") if isinstance(event, StepCompleted) else None
        begins_s = min(at_s, float(resumed)) if resumed is not None else at_s
        cause = self.charges.due(name, gpus, is_whole=not self.outages)
        return Change(job=name, gpus=gpus, from_s=begins_s, flops=_flops(job, gpus), cause=cause)

    def _incident_of(self, job: str) -> Incident | None:
        open_ones = (i for i in self.state.open_incidents if i.is_failure and job in i.jobs)
        return next((i for i in open_ones if not i.is_only_symptoms), None)

    def _cause(self, plan: Plan) -> str:
        """The failure that the plan answers, else the node that leaves, or the loss after which one is back."""
        incidents = [self.state.incidents[name] for name in plan.incidents]
        failures = [incident.id for incident in incidents if incident.is_failure]
        returns = [self._loss_of(incident.node) for incident in incidents if incident.node]
        return next((cause for cause in (*failures, *returns) if cause), "")

    def _loss_of(self, node: str) -> str:
        """The newest failure of a node, or the announcement that it leaves."""
        own = (incident for incident in self.state.incidents.values() if incident.node == node)
        incidents = (incident for incident in own if incident.is_failure or incident.kind == ANNOUNCED)
        newest = max(incidents, key=lambda incident: incident.opened_at, default=None)
        return newest.id if newest else ""

    def _watch(self, node: Node, at_s: float) -> None:
        known = self.outages.get(node.id)
        if node.status in OUT and known is None:
            self.outages[node.id] = (at_s, self._loss_of(node.id), node.num_gpus)
        elif node.status not in OUT and known:
            since_s, cause, num_gpus = self.outages.pop(node.id)
            self.ledger.out_of_use(num_gpus, since_s, at_s, cause)

    def closed(self, end_s: float) -> tuple[Segment, ...]:
        self.pass_until(end_s)
        for job in list(self.ledger.now):
            self.ledger.close(job, end_s)
        for since_s, cause, num_gpus in self.outages.values():
            self.ledger.out_of_use(num_gpus, since_s, end_s, cause)
        return tuple(self.ledger.closed)


def of_journal(events: Iterable[Event], *, end_s: float, gpu_dollars_h: float = 2.0) -> Books:
    """The accounts of a cluster from its first event until `end_s` (epoch seconds); causes are ids of incidents.

    Work that was done again is not told apart from training: the journal has no pace of iterations.
    """
    reader = _Reader()
    start_s: float | None = None
    for event in events:
        start_s = event.at if start_s is None else start_s
        reader.read(event)
    segments = reader.closed(end_s)
    return books(
        segments,
        weights={name: job.spec.weight for name, job in reader.state.jobs.items()},
        capacity_gpu_s=reader.capacity_gpu_s,
        duration_s=end_s - (end_s if start_s is None else start_s),
        gpu_dollars_h=gpu_dollars_h,
    )


def _content(change: Change) -> tuple[int, float, Use, str]:
    return change.gpus, change.flops, change.use, change.cause


def _began(incident: Incident) -> float:
    """When the fault happened, if anybody knows, else when it was first seen."""
    seen = min((failure.seen_at for failure in incident.failures), default=incident.opened_at)
    return min(seen, incident.opened_at) if incident.fault_at is None else incident.fault_at


def _next_step(active: PlanState | None, job: str) -> StepKind | None:
    if active is None:
        return None
    return next((step.kind for step in active.plan.steps if step.job == job and step.id not in active.results), None)


def _flops(job: JobState, gpus: int) -> float:
    """What it was seen, or is said, or believed to achieve on so many GPUs."""
    if gpus in job.measured:
        return job.measured[gpus]
    name, layout = job.spec.job, layout_now(job)
    own = throughput.profiles([job.spec], {name: job.measured}, measured_by_shape={name: job.measured_by_shape})[name]
    return own.flops_in(layout) if isinstance(own, Choice) and layout and layout.num_gpus == gpus else own.flops(gpus)
