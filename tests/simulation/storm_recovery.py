"""A recovery of a storm: the sequence of `flows.response`, which may be cut off wherever it yields, beside another one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storm_control import Controller
from storm_kernel import HostClock, Kernel, Process, Work
from storm_store import Broken, Store

from unicron_lib.agent.messages import DrainRanks, HoldRanks, LaunchRanks, Reply, StopRanks
from unicron_lib.domain.actions import Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import ClusterState, NodeStatus, PlanState
from unicron_lib.domain.events import (
    BreakerTripped,
    FailureDetected,
    IncidentDismissed,
    PlanDecided,
    RecoveryCompleted,
    StepCompleted,
)
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.plans import STAGES, Plan, Step, StepKind
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import IllegalTransition, StoreError
from unicron_lib.journal import Journal
from unicron_lib.planning.holding import memory_of
from unicron_lib.planning.planner import make_plan

LOOK_AGAIN_S, POLL_S = 0.25, 1.0
COMMAND_S, FIRST_ITERATION_S = 10.0, 30.0


class StepFailed(Exception):
    """A step could not have its effect."""

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


@dataclass(eq=False)
class Recovery:
    """`share` makes its allocations; `progress` is the iteration that all ranks of a job's generation have done."""

    name: str
    kernel: Kernel
    store: Store
    controller: Controller
    share: Callable[[object], object]
    progress: Callable[[str, int], int | None]

    def __post_init__(self) -> None:
        self.clock = HostClock(self.kernel)
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.store)
        self.process: Process = self.kernel.start(self.name, self._work())

    def crash(self) -> None:
        self.kernel.kill(self.process)

    def _work(self) -> Work:
        while True:
            yield self.kernel.rng.uniform(0.0, 0.05)
            try:
                state = self.journal.refresh()
                match decide(state, self.clock()):
                    case Rest():
                        yield POLL_S
                    case Wait(until=until):
                        yield min(max(until - self.clock(), 0.01), LOOK_AGAIN_S)
                    case action:
                        yield from self._act(state, action)
            except StoreError:
                yield POLL_S

    def _act(self, state: ClusterState, action: Respond | Continue | Dismiss | TripBreaker) -> Work:
        try:
            match action:
                case Respond():
                    yield from self._plan(action)
                case Dismiss(incident=name, reason=why):
                    self.journal.append(IncidentDismissed(id=f"dismissed/{name}", at=self.clock(), incident=name, reason=why))
                case TripBreaker(reason=why):
                    tripped = BreakerTripped(id=f"breaker-tripped/{state.seq}", at=self.clock(), reason=why)
                    if state.breaker_since is None:
                        self.journal.append(tripped)
                case Continue(plan=plan):
                    yield from self._carry_out(state.plans[plan])
        except IllegalTransition:
            yield LOOK_AGAIN_S

    def _plan(self, respond: Respond) -> Work:
        state = self.journal.refresh()
        plan = make_plan(state, respond, measured={}, mtbf_gpu_s=6.2e7, granularity_gpus=1, timer=lambda: 0.0, solve=self.share)
        yield self.kernel.rng.uniform(0.0, 0.3)
        try:
            self.journal.append(PlanDecided(id=plan.id, at=self.clock(), plan=plan, supersedes=respond.supersedes))
        except IllegalTransition as error:
            if self.journal.state.seq == plan.basis_seq:
                raise Broken(f"a plan is refused although nothing has come between: {error}") from error
            raise

    def _carry_out(self, progress: PlanState) -> Work:
        plan = progress.plan
        for stage in STAGES:
            todo = [step for step in plan.steps if step.kind in stage and step.id not in progress.results]
            failed: list[tuple[Step, Exception]] = []
            children = [self.kernel.start(self.name, self._step(plan, step, failed), self.process) for step in todo]
            while not all(child.is_over for child in children):
                yield LOOK_AGAIN_S
                action = decide(self._refreshed(), self.clock())
                if not isinstance(action, Continue) or action.plan != plan.id:
                    for child in children:
                        self.kernel.kill(child)
                    return
            for step, error in failed:
                if isinstance(error, StepFailed):
                    self._report(step, error)
            if failed:
                yield LOOK_AGAIN_S
                return
        yield self.kernel.rng.uniform(0.0, 0.05)
        self.journal.append(RecoveryCompleted(id=f"done/{plan.id}", at=self.clock(), plan=plan.id))

    def _refreshed(self) -> ClusterState:
        try:
            return self.journal.refresh()
        except StoreError:
            return self.journal.state

    def _report(self, step: Step, error: StepFailed) -> None:
        node = self.journal.state.nodes.get(error.node or "")
        of_node = node is not None and step.kind in {StepKind.DRAIN, StepKind.STOP}
        failure = Failure(
            id=f"step/{step.id}",
            kind=ErrorKind.OTHER,
            method=DetectionMethod.PROCESS,
            seen_at=self.clock(),
            job=None if of_node else step.job,
            generation=step.generation,
            node=error.node,
            boot=node.boot if node else None,
            evidence=f"{step.kind} failed: {error}",
        )
        self.journal.append(FailureDetected(id=failure.id, at=self.clock(), failure=failure))

    # --- steps

    def _step(self, plan: Plan, step: Step, failed: list[tuple[Step, Exception]]) -> Work:
        try:
            yield self.kernel.rng.uniform(0.0, 0.1)
            result: dict[str, object] = {}
            yield from self._effect(plan, step, result)
            yield self.kernel.rng.uniform(0.0, 0.1)
            self.journal.append(StepCompleted(id=step.id, at=self.clock(), plan=plan.id, result=result))
        except (StepFailed, StoreError) as error:
            failed.append((step, error))

    def _effect(self, plan: Plan, step: Step, result: dict[str, object]) -> Work:
        match step.kind:
            case StepKind.RESTORE:
                saved = self.store.fence(step.job, step.generation)
                held = self._result_of(plan, step.job, StepKind.DRAIN).get("iteration", -1)
                result |= {"iteration": max(held, saved), "fallback_iteration": saved}
            case StepKind.RESUME:
                yield from self._resume(step, result)
            case StepKind.LAUNCH:
                yield from self._launch(plan, step)
            case StepKind.STOP:
                for node in step.nodes:
                    yield from self._ask_to_leave(step, node)
            case StepKind.DRAIN:
                ranks = []
                for node in step.nodes:
                    reply = yield from self._ask_to_leave(step, node)
                    ranks += [{**rank, "node": node} for rank in reply.result["ranks"]] if reply and step.hold else []
                result |= (step.hold and memory_of(step.hold, ranks)) or {}

    def _ask_to_leave(self, step: Step, node: str) -> "Work":
        it, hold = {"step": f"{step.id}/{node}", "job": step.job, "below_generation": step.generation}, step.hold
        if step.kind is StepKind.STOP:
            command = StopRanks(**it, grace_s=2.0, keep_gpus=hold.gpus_on(node) if hold else ())
        elif hold:
            command = HoldRanks(**it, deadline_s=2.0, abort=hold.abort, condemned=hold.condemned)
        else:
            command = DrainRanks(**it, deadline_s=2.0)
        try:
            return (yield from self._send(node, command))
        except StepFailed:
            if not self._is_out(node):
                raise
            status = self._refreshed().nodes[node].status
            self.kernel.tell(f"{node} is {status} and away: {self.name} asks nothing more of it for {step.kind} of {step.job}")

    def _launch(self, plan: Plan, step: Step) -> Work:
        assignment, state = plan.assignment_of(step.job), self.journal.refresh()
        restored = self._result_of(plan, step.job, StepKind.RESTORE)
        for number, node in enumerate(assignment.nodes):
            command = LaunchRanks(
                step=f"{step.id}/{node}",
                job=step.job,
                generation=step.generation,
                spec=state.jobs[step.job].spec,
                layout=assignment.layout,
                ranks=assignment.ranks_on(node),
                world_size=assignment.num_gpus,
                node_rank=number,
                num_nodes=len(assignment.nodes),
                master_addr="",
                master_port=1,
                store_url="",
                restore_from=str(restored["fallback_iteration"]),
            )
            yield from self._send(node, command)

    def _result_of(self, plan: Plan, job: str, kind: StepKind) -> Mapping[str, object]:
        results = self.journal.state.plans[plan.id].results
        return next((results[s.id] for s in plan.steps if s.job == job and s.kind is kind and s.id in results), {})

    def _resume(self, step: Step, result: dict[str, object]) -> Work:
        deadline = self.kernel.now + FIRST_ITERATION_S
        while self.kernel.now < deadline:
            if not self._refreshed().jobs[step.job].wants_gpus:
                return
            if self.controller.is_up and (iteration := self.progress(step.job, step.generation)) is not None:
                result["iteration"] = iteration
                return
            yield LOOK_AGAIN_S
        raise StepFailed(f"{step.job} made no iteration within {FIRST_ITERATION_S} s")

    def _send(self, node: str, command: object) -> "Work":
        """Until there is an answer, however long the controller is away. Raises StepFailed."""
        while True:
            reply = yield from self._asked(node, command)
            if reply is None:
                if self._stays_away(node):
                    raise StepFailed(f"{node} did not answer {command.step}", node)
                yield 0.2
            elif reply.ok:
                return reply
            else:
                raise StepFailed(f"{node} refused {command.step}: {reply.error}", node)

    def _asked(self, node: str, command: object) -> "Work":
        record = self.controller.records.get(node)
        if not self.controller.is_up or record is None or not record.joined or not self.controller.nodes[node].link:
            return None
        box = self.controller.command(self.controller.nodes[node], command)
        deadline = self.kernel.now + COMMAND_S
        while not box and self.kernel.now < deadline:
            yield 0.05
        if not box:
            raise StepFailed(f"{node} has not answered {command.step} within {COMMAND_S} s", node)
        reply: Reply | None = box[0]
        return reply

    def _is_out(self, node: str) -> bool:
        state = self._refreshed()
        return node not in state.nodes or state.nodes[node].status not in {NodeStatus.READY, NodeStatus.SUSPECT}

    def _stays_away(self, node: str) -> bool:
        if not self._is_out(node):
            return False
        record = self.controller.records.get(node)
        is_judged = self.controller.is_up and record is not None and record.lost
        return is_judged or self.journal.state.nodes[node].status is NodeStatus.LOST
