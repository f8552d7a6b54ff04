"""A small cluster whose events, plans and steps tests play by hand."""

from dataclasses import dataclass, field

from unicron_lib.domain.actions import Action, Continue, Dismiss, Respond, TripBreaker
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import (
    BreakerTripped,
    Event,
    FailureDetected,
    IncidentDismissed,
    JobFinished,
    JobResumed,
    JobSubmitted,
    NodeJoined,
    NodeSuspected,
    PlanDecided,
    RecoveryCompleted,
    StepCompleted,
)
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.plans import Plan
from unicron_lib.domain.recovery import decide, on_event
from unicron_lib.planning.planner import make_plan

TABLE = {2: 0.50e9, 4: 0.90e9, 6: 1.08e9, 8: 1.20e9}


@dataclass
class Scene:
    """Folds events; its clock moves by hand."""

    state: ClusterState = field(default_factory=ClusterState)
    now: float = 1000.0
    events: list[Event] = field(default_factory=list)
    counter: int = 0
    granularity_gpus: int = 2

    def tell(self, event: Event) -> None:
        self.state, action = on_event(self.state, event)
        assert action == decide(self.state, event.at)
        self.events.append(event)

    def new_id(self, what: str) -> str:
        self.counter += 1
        return f"{what}-{self.counter}"

    def join(self, node: str, num_gpus: int = 2) -> None:
        boot = self.new_id("boot")
        event = NodeJoined(id=self.new_id("join"), at=self.now, node=node, boot=boot, address="127.0.0.1", num_gpus=num_gpus)
        self.tell(event)

    def suspect(self, node: str) -> None:
        boot = self.state.nodes[node].boot
        self.tell(NodeSuspected(id=self.new_id("suspect"), at=self.now, node=node, boot=boot, reason="closed"))

    def leave(self, node: str, in_s: float = 120.0) -> None:
        boot, told = self.state.nodes[node].boot, self.new_id("leave")
        at = {"at": self.now, "leaves_at": self.now + in_s}
        self.tell(LeaveAnnounced(id=told, node=node, boot=boot, reason="a spot interruption notice says terminate", **at))

    def submit(self, job: str, **keys: object) -> None:
        keys = {"min_gpus": 2, "throughput_flops": TABLE, **keys}
        spec = JobSpec(job=job, **keys)
        self.tell(JobSubmitted(id=self.new_id("submit"), at=self.now, submission=self.new_id("run"), spec=spec))

    def finish(self, job: str) -> None:
        generation = self.state.jobs[job].generation
        self.tell(JobFinished(id=self.new_id("finish"), at=self.now, job=job, generation=generation, iteration=99))

    def fail(self, kind: ErrorKind, job: str, rank: int = 0, *, name: str = "", **keys: object) -> Failure:
        state = self.state.jobs[job]
        held = state.assignment or state.pending
        found = {
            "generation": state.generation,
            "node": held.slots[rank].node if held else None,
            "iteration": (-1 if state.failed_at is None else state.failed_at) + 1,
            "method": DetectionMethod.EXCEPTION,
            "seen_at": self.now,
            **keys,
        }
        failure = Failure(
            id=name or self.new_id("failure"),
            kind=kind,
            job=job,
            rank=rank,
            evidence="it broke",
            **found,
        )
        self.tell(FailureDetected(id=failure.id, at=self.now, failure=failure))
        return failure

    def stall(self, job: str, rank: int, kind: ErrorKind = ErrorKind.TASK_HANG, patience_s: float = 5.0) -> Failure:
        act_at = self.now + patience_s
        return self.fail(kind, job, rank, method=DetectionMethod.STATISTICS, not_before=act_at)

    def resume(self, job: str, rank: int | None = None) -> None:
        generation = self.state.jobs[job].generation
        told = self.new_id("resumed")
        self.tell(JobResumed(id=told, at=self.now, job=job, generation=generation, iteration=7, rank=rank))

    def all_resume(self, job: str) -> None:
        """Each rank tells that it goes on."""
        for rank in range(self.state.jobs[job].gpus):
            self.resume(job, rank)

    def lose(self, node: str) -> None:
        self.fault(ErrorKind.NODE_LOST, node)

    def fault(self, kind: ErrorKind, node: str, **keys: object) -> Failure:
        """Something is told of a node."""
        found = {"boot": self.state.nodes[node].boot, "seen_at": self.now, "evidence": "told of the node", **keys}
        failure = Failure(id=self.new_id("fault"), kind=kind, method=DetectionMethod.NODE_HEALTH, node=node, **found)
        self.tell(FailureDetected(id=failure.id, at=self.now, failure=failure))
        return failure

    def decide(self) -> Action:
        return decide(self.state, self.now)

    def plan(self, respond: Respond) -> Plan:
        plan = make_plan(
            self.state,
            respond,
            measured={},
            mtbf_gpu_s=6.2e7,
            granularity_gpus=self.granularity_gpus,
            time_limit_s=5.0,
            timer=lambda: 0.0,
        )
        self.tell(PlanDecided(id=plan.id, at=self.now, plan=plan, supersedes=respond.supersedes))
        return plan

    def step(self, plan: str, **result: object) -> bool:
        """Carry out the next step of `plan`, or complete it; False if it is over."""
        progress = self.state.plans[plan]
        if not progress.is_active:
            return False
        todo = [step for step in progress.plan.steps if step.id not in progress.results]
        if todo:
            self.tell(StepCompleted(id=todo[0].id, at=self.now, plan=plan, result=result))
            return True
        self.tell(RecoveryCompleted(id=self.new_id("done"), at=self.now, plan=plan))
        return False

    def note(self, action: Dismiss | TripBreaker) -> None:
        """Journal what needs no plan."""
        if isinstance(action, Dismiss):
            told, name = self.new_id("dismissed"), action.incident
            self.tell(IncidentDismissed(id=told, at=self.now, incident=name, reason=action.reason))
        else:
            self.tell(BreakerTripped(id=self.new_id("tripped"), at=self.now, reason=action.reason))

    def settle(self) -> None:
        """Do whatever is to do until nothing is."""
        for _ in range(50):
            self.now += 1.5
            match self.decide():
                case Respond() as respond:
                    plan = self.plan(respond).id
                    while self.step(plan):
                        pass
                case Continue(plan=plan):
                    while self.step(plan):
                        pass
                case Dismiss() | TripBreaker() as action:
                    self.note(action)
                case _:
                    if not self.state.open_incidents:
                        return
        raise AssertionError(f"still open: {self.state.open_incidents}")


def running_pair() -> Scene:
    """Two jobs, four GPUs each, on four nodes of two."""
    scene = Scene()
    for number in range(1, 5):
        scene.join(f"node-{number}")
    scene.submit("gpt-a", weight=2.0, max_gpus=8)
    scene.submit("gpt-b", weight=1.0, max_gpus=4, throughput_flops={2: 0.5e9, 4: 0.9e9})
    scene.settle()
    assert {name: job.gpus for name, job in scene.state.jobs.items()} == {"gpt-a": 4, "gpt-b": 4}
    return scene
