"""Random storms of events against the recovery core: the invariants of the design hold after each of them."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Continue, Dismiss, Respond, TripBreaker
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import BreakerReset, NodeCleared, NodeQuarantined
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import ENDED
from unicron_lib.domain.journal import fold_all
from unicron_lib.simulation.invariants import broken

NODES = tuple(f"node-{number}" for number in range(1, 6))
KINDS = (
    *(ErrorKind.ECC_ERROR, ErrorKind.PROCESS_EXIT, ErrorKind.CONNECTION_RESET, ErrorKind.NVLINK_ERROR, ErrorKind.TASK_HANG),
    *(ErrorKind.GPU_LOST, ErrorKind.USER_ERROR, ErrorKind.STORAGE_ERROR),
)
OF_NODES = (ErrorKind.GPU_LOST, ErrorKind.OTHER, ErrorKind.LINK_FLAPPING)


class Storm(RuleBasedStateMachine):
    """Events arrive at any moment, also between two steps of a transition."""

    def __init__(self):
        super().__init__()
        self.scene = Scene()
        self.generations = {}
        self.allowed = set()

    @initialize(running=st.booleans())
    def begin(self, running):
        if running:
            self.scene = running_pair()

    @rule(node=st.sampled_from(NODES))
    def join(self, node):
        self.scene.join(node)

    @rule(node=st.sampled_from(NODES))
    def lose(self, node):
        if node in self.scene.state.nodes:
            self.scene.lose(node)

    @rule(node=st.sampled_from(NODES))
    def leave(self, node):
        if node in self.scene.state.nodes:
            self.scene.leave(node)

    @rule(node=st.sampled_from(NODES), kind=st.sampled_from(OF_NODES), symptom=st.booleans())
    def fault(self, node, kind, symptom):
        if node in self.scene.state.nodes:
            self.scene.fault(kind, node, symptom=symptom)

    @rule(data=st.data(), kind=st.sampled_from((ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT)), goes_on=st.booleans())
    def stall(self, data, kind, goes_on):
        running = [name for name, job in self.scene.state.jobs.items() if job.assignment and job.status not in ENDED]
        if running:
            name = data.draw(st.sampled_from(running))
            self.scene.stall(name, 0, kind)
            if goes_on:
                self.scene.resume(name, 0)

    @rule(false_alarm=st.booleans())
    def reset_breaker(self, false_alarm):
        self.allowed |= {it.node for it in self.scene.state.incidents.values() if it.held}
        self.scene.tell(BreakerReset(id=self.scene.new_id("reset"), at=self.scene.now, false_alarm=false_alarm))

    @rule(node=st.sampled_from(NODES))
    def quarantine_by_hand(self, node):
        self.allowed.add(node)
        told = self.scene.new_id("by hand")
        self.scene.tell(NodeQuarantined(id=told, at=self.scene.now, node=node, reason="a person wants it"))

    @rule(node=st.sampled_from(NODES))
    def clear(self, node):
        if node in self.scene.state.nodes:
            boot, told = self.scene.state.nodes[node].boot, self.scene.new_id("cleared")
            self.scene.tell(NodeCleared(id=told, at=self.scene.now, node=node, boot=boot))

    @rule(node=st.sampled_from(NODES))
    def suspect(self, node):
        if node in self.scene.state.nodes:
            self.scene.suspect(node)

    @rule(name=st.sampled_from(("gpt-a", "gpt-b", "gpt-c")), weight=st.sampled_from((0.5, 1.0, 4.0)))
    def submit(self, name, weight):
        self.scene.submit(name, weight=weight, max_gpus=8, max_restarts=100)  # a storm spends any budget

    @rule(kind=st.sampled_from(KINDS), data=st.data(), progress=st.integers(0, 2))
    def fail(self, kind, data, progress):
        running = [name for name, job in self.scene.state.jobs.items() if job.assignment and job.status not in ENDED]
        if running:
            name = data.draw(st.sampled_from(running))
            job = self.scene.state.jobs[name]
            rank = data.draw(st.integers(0, job.gpus - 1))
            self.scene.fail(kind, name, rank, iteration=(job.failed_at or 0) + progress)

    @rule(data=st.data())
    def finish(self, data):
        if self.scene.state.jobs:
            self.scene.finish(data.draw(st.sampled_from(sorted(self.scene.state.jobs))))

    @rule(wait_s=st.sampled_from((0.1, 1.0, 5.0)), steps=st.integers(0, 6))
    def recover(self, wait_s, steps):
        """Work on a recovery for a while, perhaps not to its end."""
        self.scene.now += wait_s
        match self.scene.decide():
            case Respond() as respond:
                before = self.scene.state
                plan = self.scene.plan(respond).id
                assert broken(before, self.scene.events[-1], self.scene.state) is None
            case Continue(plan=plan):
                pass
            case Dismiss() | TripBreaker() as action:
                self.scene.note(action)
                return
            case _:
                return
        for _ in range(steps):
            if not self.scene.step(plan):
                return

    @invariant()
    def no_job_gets_gpus_that_are_not_there(self):
        state = self.scene.state
        active = state.active_plan
        if active is None:
            return
        targets = [slot for a in active.plan.assignments for slot in a.slots]
        assert len(targets) == len(set(targets))
        for assignment in active.plan.assignments:
            spec = state.jobs[assignment.job].spec
            assert spec.min_gpus <= assignment.num_gpus <= (spec.max_gpus or assignment.num_gpus)

    @invariant()
    def generations_only_rise(self):
        for name, job in self.scene.state.jobs.items():
            assert job.generation >= self.generations.get(name, 0)
            self.generations[name] = job.generation

    @invariant()
    def at_most_one_plan_runs(self):
        assert sum(plan.is_active for plan in self.scene.state.plans.values()) <= 1

    @invariant()
    def quarantined_nodes_are_never_a_majority_by_our_own_doing(self):
        ours = [node for node in self.scene.state.nodes.values() if node.id not in self.allowed]
        isolated = [node for node in ours if node.status is NodeStatus.QUARANTINED and self.scene.now - node.since < 300]
        assert len(isolated) <= max(1, len(self.scene.state.nodes) * 0.5)

    @rule(verdict=st.booleans())
    def calm_down(self, verdict):
        """Left alone, everything closes, each incident with one completed plan, and GPUs are never given twice.

        Also if there is no verdict on a silent node.
        """
        for node in self.scene.state.nodes.values():
            if verdict and node.status is NodeStatus.SUSPECT:
                self.scene.lose(node.id)
        self.scene.settle()
        state = self.scene.state
        held = [slot for job in state.jobs.values() if job.assignment for slot in job.assignment.slots]
        assert len(held) == len(set(held))
        there = {node.id for node in state.nodes.values() if node.status in {NodeStatus.READY, NodeStatus.SUSPECT}}
        assert all(slot.node in there for slot in held)
        for incident in state.incidents.values():
            assert incident.status in {IncidentStatus.CLOSED, IncidentStatus.MERGED}
            done = [p for p in state.plans.values() if p.finished_at is not None and incident.id in p.plan.incidents]
            answered = incident.status is IncidentStatus.CLOSED and incident.plan is not None
            assert len(done) == answered
            is_stall = any(failure.is_stall for failure in incident.failures)
            assert answered or is_stall or incident.is_of_nodes or incident.status is IncidentStatus.MERGED
        assert fold_all(self.scene.events) == state


Storm.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStorm = Storm.TestCase
