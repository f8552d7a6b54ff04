"""The object store of a storm, and the witness who sees each entry of the journal land and checks the invariants."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from storm_kernel import Kernel

import unicron_lib.journal as production
from unicron_lib.agent.messages import StopRanks
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event, FailureDetected, PlanDecided, StepCompleted
from unicron_lib.domain.journal import fold
from unicron_lib.domain.plans import Plan, PlanKind, StepKind
from unicron_lib.errors import ObjectNotFound, StoreError
from unicron_lib.planning.scene import current_slots, is_moving
from unicron_lib.simulation.invariants import broken


class Broken(AssertionError):
    """An invariant does not hold."""


class _Json:
    """Entries by their bytes: that they survive JSON is another test's business."""

    def __init__(self) -> None:
        self._known: dict[bytes, production.Entry] = {}

    def dump_json(self, entry: production.Entry) -> bytes:
        data = ENTRY_JSON.dump_json(entry)
        self._known[data] = entry
        return data

    def validate_json(self, data: bytes) -> production.Entry:
        return self._known[data]


class _Fold:
    """The fold, once for all who read the same entry after the same ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[ClusterState, Event, ClusterState]] = {}

    def __call__(self, state: ClusterState, event: Event) -> ClusterState:
        key = id(state) if state.seq >= 0 else 0, id(event)
        if key not in self._known:
            self._known[key] = state, event, fold(state, event)
        return self._known[key][2]


ENTRY_JSON = production._entry_json


@contextmanager
def remembered() -> Iterator[None]:
    """Within, journals share what they have read: a thousand storms are a million entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(production, "_entry_json", _Json())
        patch.setattr(production, "fold", _Fold())
        yield


@dataclass
class Witness:
    """Folds what has landed, as nobody in the storm can; raises Broken."""

    kernel: Kernel
    state: ClusterState = field(default_factory=ClusterState)
    events: list[Event] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)
    left_behind: list[str] = field(default_factory=list)
    adopted: int = 0

    def part(self, node: str, command: StopRanks, parked: Mapping[int, int]) -> None:
        """Ranks that are `parked`, by GPU with the generation that they are held for, are about to be ended."""
        for it in self.state.plans.values():
            for step in it.plan.steps:
                if step.kind is StepKind.STOP and step.hold and step.job == command.job:
                    lost = [gpu for gpu in step.hold.gpus_on(node) if parked.get(gpu) == step.generation]
                    if lost and it.is_active:
                        raise Broken(f"{command.step} ends ranks on {node}, GPUs {lost}, which {it.plan.id} wants to keep")

    def see(self, event: Event) -> None:
        self.kernel.tell(f"journal {self.state.seq + 1}: {told(event)}")
        before, self.state = self.state, fold(self.state, event)
        self.events.append(event)
        self.ids[event.id] += 1
        if self.ids[event.id] > 1:
            raise Broken(f"{event.id} is journalled twice")
        wrong = broken(before, event, self.state) or _touched_in_health(before, event) or _blamed_for_nothing(event)
        if wrong:
            raise Broken(wrong)
        if sum(plan.is_active for plan in self.state.plans.values()) > 1:
            raise Broken("two plans are under way at once")


def told(event: Event) -> str:
    """One line of a story."""
    match event:
        case PlanDecided(plan=plan):
            over = f", supersedes {event.supersedes}" if event.supersedes else ""
            moves = {a.job: (a.generation, [f"{s.node}/{s.gpu}" for s in a.slots]) for a in plan.assignments}
            return f"{plan.kind} {plan.id} for {', '.join(plan.incidents)}{over}: {moves}, paused {plan.paused}: {plan.reason}"
        case StepCompleted():
            return f"step {event.id} of {event.plan}: {dict(event.result)}"
        case _:
            return str(getattr(event, "failure", event))


def _touched_in_health(before: ClusterState, event: Event) -> str | None:
    """Whom a plan moves although nothing of it has failed, it is not under way, and it gets the same GPUs."""
    if not isinstance(event, PlanDecided):
        return None
    hit = {job for name in event.plan.incidents for job in before.incidents[name].jobs}
    for name in {step.job for step in event.plan.steps} - hit:
        job = before.jobs[name]
        if not is_moving(job) and job.wants_gpus and _stays(before, event.plan, name):
            return f"plan {event.plan.id} touches {name}, which is in the best of health and stays where it is"
    return None


def _blamed_for_nothing(event: Event) -> str | None:
    """A node that obeys the newest generation only is as it should be."""
    is_refusal = isinstance(event, FailureDetected) and "has been replaced" in event.failure.evidence
    return (
        f"{event.failure.node} is blamed for its refusal of a replaced generation"
        if is_refusal and event.failure.job is None
        else None
    )


def _stays(before: ClusterState, plan: Plan, name: str) -> bool:
    assignment = plan.assignment_of(name)
    return plan.kind is not PlanKind.REALLOCATE or bool(assignment and assignment.slots == current_slots(before.jobs[name]))


@dataclass
class Store:
    """An object store in memory. While it is `away` it refuses; while `mumbling`, a write may land and its answer be lost."""

    kernel: Kernel
    witness: Witness
    away: bool = False
    mumbling: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    saved: dict[str, tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def _answering(self):
        if self.away:
            raise StoreError("the store is out of reach")
        yield
        if self.mumbling and self.kernel.rng.random() < 0.3:
            raise StoreError("the store's answer was lost")

    def get(self, key: str) -> bytes:
        with self._answering():
            if key not in self.objects:
                raise ObjectNotFound(key)
            return self.objects[key]

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.kernel.rng.random() < 0.05:
            self.kernel.hold_up(0.3)  # others write meanwhile
        with self._answering():
            if key in self.objects:
                return self.objects[key] == data
            self.objects[key] = data
            if key.startswith("journal/"):
                self.witness.see(production._entry_json.validate_json(data).event)
        return True

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        with self._answering():
            return sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)

    def fence(self, job: str, generation: int) -> int:
        """From here on older generations cannot save; the newest iteration that is saved, -1 if none is."""
        with self._answering():
            self.fences[job] = max(self.fences.get(job, 0), generation)
            return self.saved.get(job, (0, -1))[1]

    def save(self, job: str, generation: int, iteration: int) -> None:
        """A checkpoint, unless a newer generation has fenced this one off."""
        if self.away or generation < self.fences.get(job, 0):
            return
        before = self.saved.get(job, (0, -1))
        if generation < before[0] or iteration < before[1]:
            raise Broken(f"{job}: generation {generation} saves iteration {iteration} over {before}")
        self.saved[job] = generation, iteration
