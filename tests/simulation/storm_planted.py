"""Bugs that are planted into the production code: storms must find each, or they look for nothing."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pytest
from storm_store import Store

from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memo import StepMemo
from unicron_lib.agent.window import Window
from unicron_lib.domain import carrying_out, job_life, journal, judging, recovery, rewinding
from unicron_lib.domain.cluster import ClusterState, NodeStatus, PlanState
from unicron_lib.domain.events import JobSubmitted, StepCompleted
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.journal import Journal
from unicron_lib.planning import pooled


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A node obeys replaced generations."""
    patch.setattr(Fence, "admits", lambda *_: True)


def no_memo(patch: pytest.MonkeyPatch) -> None:
    """A step that is asked for again is done again."""
    patch.setattr(StepMemo, "recall", lambda *_: None)


def no_ids(patch: pytest.MonkeyPatch) -> None:
    """The journal takes an event as often as it is told."""

    def accept(self: Journal, state: ClusterState, _: str) -> None:
        self._state = state

    patch.setattr(Journal, "_accept", accept)


def no_condition(patch: pytest.MonkeyPatch) -> None:
    """Of two writers of one entry both win."""
    put_if_absent = Store.put_if_absent

    def put(self: Store, key: str, data: bytes) -> bool:
        put_if_absent(self, key, data)
        return True

    patch.setattr(Store, "put_if_absent", put)


def no_resending(patch: pytest.MonkeyPatch) -> None:
    """What is sent is forgotten."""
    take = Window.take

    def forget(self: Window) -> tuple[object, ...]:
        taken = take(self)
        self._outbox.acknowledge(seen.seq for seen in taken)
        return taken

    patch.setattr(Window, "take", forget)


def no_escalation(patch: pytest.MonkeyPatch) -> None:
    """Restarts go on where they never help."""
    patch.setattr(judging, "_escalated", lambda root, _, told: (root.severity, told))


def no_supersession(patch: pytest.MonkeyPatch) -> None:
    """A plan that has been replaced goes on."""
    patch.setattr(PlanState, "is_active", property(lambda self: self.finished_at is None))


def _usable(patch: pytest.MonkeyPatch, *also: NodeStatus) -> None:
    usable = {NodeStatus.READY, *also}
    healthy = property(lambda self: tuple(node for _, node in sorted(self.nodes.items()) if node.status in usable))
    patch.setattr(ClusterState, "healthy_nodes", healthy)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The planner puts ranks on isolated nodes."""
    _usable(patch, NodeStatus.QUARANTINED)


def no_snooze(patch: pytest.MonkeyPatch) -> None:
    """The planner puts ranks on nodes that come and go."""
    _usable(patch, NodeStatus.SNOOZED)


def no_inheritance(patch: pytest.MonkeyPatch) -> None:
    """Who replaces a plan forgets what that one was for."""

    def forgetful(plan: Callable[..., object]) -> Callable[..., object]:
        def wrapped(state: object, incidents: list, verdicts: dict, supersedes: str | None = None) -> object:
            kept = [it for it in incidents if it.id in verdicts] if supersedes else incidents
            return plan(state, kept, verdicts, supersedes)

        return wrapped

    patch.setattr(recovery, "_reallocate", forgetful(recovery._reallocate))
    patch.setattr(recovery, "_restart", forgetful(recovery._restart))


def no_budget(patch: pytest.MonkeyPatch) -> None:
    """A job may fail as often as it likes."""
    patch.setattr(judging, "spent", lambda *_: None)


def no_way_back(patch: pytest.MonkeyPatch) -> None:
    """A job whose loss went wrong goes on from its newest checkpoint."""
    rewound = carrying_out.rewound
    patch.setattr(carrying_out, "rewound", lambda job, rewind: replace(rewound(job, rewind), rolled_back_to=None))


def no_leaving_out(patch: pytest.MonkeyPatch) -> None:
    """A job that went back reads the same batches again."""
    patch.setattr(rewinding, "leaving_out", lambda skipped, **_: skipped)


def _fold(patch: pytest.MonkeyPatch, kind: type, by: Callable[..., ClusterState]) -> None:
    patch.setattr(journal, "FOLDS", {**journal.FOLDS, kind: by})


def no_patience_on_the_way_back(patch: pytest.MonkeyPatch) -> None:
    """A job has gone back as soon as it is known where to, though its ranks still live."""
    completed = carrying_out.step_completed

    def early(state: ClusterState, event: object) -> ClusterState:
        state = completed(state, event)
        step = next(it for it in state.plans[event.plan].plan.steps if it.id == event.id)
        job = state.jobs[step.job]
        is_told = step.kind is StepKind.RESTORE and state.plans[event.plan].is_active
        return state.with_job(replace(job, restored=True, rolled_back_to=None)) if is_told else state

    _fold(patch, StepCompleted, early)


def no_end(patch: pytest.MonkeyPatch) -> None:
    """Jobs that were cancelled get GPUs."""
    ended = {JobStatus.FINISHED, JobStatus.FAILED}
    patch.setattr(JobState, "wants_gpus", property(lambda self: self.status not in ended))


def no_new_beginning(patch: pytest.MonkeyPatch) -> None:
    """What an earlier submission does counts for the new one."""
    submitted = job_life.job_submitted

    def forgetful(state: ClusterState, event: object) -> ClusterState:
        state = submitted(state, event)
        return state.with_job(replace(state.jobs[event.spec.job], begins_with=0))

    _fold(patch, JobSubmitted, forgetful)


def no_pools(patch: pytest.MonkeyPatch) -> None:
    """The planner does not ask in which pools a job may run."""

    def anywhere(spec: JobSpec, known: Mapping[int, float], *, pools: Iterable[str], home: str | None) -> dict[str, object]:
        return dict.fromkeys(pools, known or dict(spec.throughput_by_pool.get(home or "fast", {})))

    patch.setattr(pooled, "tables", anywhere)


PLANTED = (
    *(no_fence, no_memo, no_ids, no_condition, no_resending, no_escalation, no_supersession, no_quarantine, no_inheritance),
    *(no_snooze, no_budget, no_way_back, no_leaving_out, no_patience_on_the_way_back, no_end, no_new_beginning, no_pools),
)
