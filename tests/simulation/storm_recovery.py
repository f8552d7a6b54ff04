"""A recovery of a storm: the sequence of `flows.response`, which may be cut off wherever it yields, beside another one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storm_control import Controller
from storm_kernel import HostClock, Kernel, Process, Work
from storm_store import Store
from storm_witness import Broken

from unicron_lib.agent.messages import DrainRanks, HoldRanks, LaunchRanks, Reply, SaveReplica, StopRanks
from unicron_lib.domain.actions import Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import ClusterState, NodeStatus, PlanState
from unicron_lib.domain.events import (
    BreakerTripped,
    FailureDetected,
    IncidentDismissed,
    PlanDecided,
    RebalanceDue,
    RecoveryCompleted,
    StepCompleted,
)
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.plans import STAGES, Plan, PlanKind, Step, StepKind
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import IllegalTransition, StaleGeneration, StoreError
from unicron_lib.journal import Journal
from unicron_lib.planning.holding import iteration_of, memory_of
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.pooled import is_pooled

LOOK_AGAIN_S, POLL_S, REBALANCE_S = 0.25, 1.0, 10.0
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
        self.looks_at, self.looked_at = 0.0, -1
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
                        self._look_at_pools(state)
                        yield POLL_S
                    case Wait(until=until):
                        yield min(max(until - self.clock(), 0.01), LOOK_AGAIN_S)
                    case action:
                        yield from self._act(state, action)
            except StoreError:
                yield POLL_S

    def _look_at_pools(self, state: ClusterState) -> None:
        """Now and then, as `flows.foresight` does it with what `tasks.planning.better_pools` finds."""
        if not is_pooled([job.spec for job in state.jobs.values() if job.wants_gpus], state.nodes.values()):
            return
        if self.kernel.now < self.looks_at or state.open_incidents or state.seq == self.looked_at or not state.jobs:
            return
        self.looks_at, self.looked_at = self.kernel.now + REBALANCE_S, state.seq
        plan = self._plan_for(state, Respond(kind=PlanKind.REALLOCATE, incidents=(), attempt=1, reason="a look at all pools"))
        home = {node.id: node.pool for node in state.nodes.values()}
        pools = {name: {home[node] for node in job.nodes if node in home} for name, job in state.jobs.items()}
        if moving := sorted(it.job for it in plan.assignments if home[it.slots[0].node] not in pools[it.job]):
            due = RebalanceDue(id=f"rebalance/{plan.id}", at=self.clock(), gain=plan.gain, reason=", ".join(moving))
            self.journal.append(due)

    def _plan_for(self, state: ClusterState, respond: Respond) -> Plan:
        known = {"measured": {}, "mtbf_gpu_s": 6.2e7, "granularity_gpus": 1}
        return make_plan(state, respond, **known, timer=lambda: 0.0, solve=self.share)

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
        plan = self._plan_for(state, respond)
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
                self._restore(plan, step, result)
            case StepKind.RESUME:
                yield from self._resume(step, result)
            case StepKind.LAUNCH:
                yield from self._launch(plan, step)
            case StepKind.STOP:
                for node in step.nodes:
                    yield from self._ask_to_leave(step, node)
            case StepKind.DRAIN:
                yield from self._drain(step, result)

    def _drain(self, step: Step, result: dict[str, object]) -> Work:
        if self.journal.refresh().jobs[step.job].rolled_back_to is not None:
            result |= {"source": "an earlier checkpoint", "iteration": None, "manifest": None}
            return
        ranks = []
        for node in step.nodes:
            reply = yield from self._ask_to_leave(step, node)
            ranks += [{**rank, "node": node} for rank in reply.result["ranks"]] if reply else []
        if step.hold and (memory := memory_of(step.hold, ranks)):
            result |= memory
        else:
            yield from self._save(step, ranks, result)

    def _save(self, step: Step, ranks: list[dict[str, object]], result: dict[str, object]) -> Work:
        """Where the work of drained and parked ranks is safe in the store."""
        saved = max((rank for rank in ranks if rank["manifest"]), key=iteration_of, default=None)
        parked = [r for r in ranks if r["state"] == "parked" and (saved is None or iteration_of(r) > iteration_of(saved))]
        for rank in sorted(parked, key=lambda rank: (-iteration_of(rank), rank["rank"])):
            key = f"{step.id}/save/{rank['generation']}-{rank['rank']}"
            who = {"job": step.job, "generation": rank["generation"], "rank": rank["rank"]}
            command = SaveReplica(step=key, **who, deadline_s=COMMAND_S, as_generation=step.generation - 1)
            try:
                reply = yield from self._send(rank["node"], command)
            except StepFailed:
                continue
            result |= {"source": f"replica of rank {rank['rank']} at {rank['node']}", **reply.result}
            return
        found = saved or {"iteration": None, "manifest": None}
        result |= {"source": "drained" if saved else "the newest checkpoint"}
        result |= {key: found[key] for key in ("iteration", "manifest")}

    def _restore(self, plan: Plan, step: Step, result: dict[str, object]) -> None:
        job = self.journal.refresh().jobs[step.job]
        anew = not job.restored and job.spec.load != "latest"
        try:
            saved = self.store.fence(step.job, step.generation, anew=anew, up_to=job.rolled_back_to)
        except StaleGeneration as error:
            raise StepFailed(str(error)) from error
        drained = self._result_of(plan, step.job, StepKind.DRAIN)
        result |= {"manifest": saved.key, "iteration": saved.iteration}
        if drained.get("held"):
            result |= {"iteration": max(iteration_of(drained), saved.iteration), "fallback_iteration": saved.iteration}

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
                restore_from=restored["manifest"],
                skipped=state.jobs[step.job].skipped,
            )
            yield from self._send(node, command)

    def _result_of(self, plan: Plan, job: str, kind: StepKind) -> Mapping[str, object]:
        results = self.journal.state.plans[plan.id].results
        return next((results[s.id] for s in plan.steps if s.job == job and s.kind is kind and s.id in results), {})

    def _resume(self, step: Step, result: dict[str, object]) -> Work:
        deadline = self.kernel.now + FIRST_ITERATION_S
        while self.kernel.now < deadline:
            job = self._refreshed().jobs[step.job]
            if not job.wants_gpus or step.generation < job.begins_with:
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
            yield 0.1
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
