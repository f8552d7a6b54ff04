"""The cluster of a storm: nodes, jobs that train on them, the processes that heal them, and a person."""

from collections.abc import Callable
from dataclasses import dataclass, field

from storm_control import ORPHAN_AGE_S, Controller, Health
from storm_kernel import Kernel, Network, Work
from storm_node import Node
from storm_recovery import Recovery
from storm_store import Store
from storm_training import SAVE_INTERVAL, SHORT, SHORT_ITERS, Training
from storm_witness import Witness

from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import BreakerReset, JobCancelled, NodeReleased, submitted
from unicron_lib.domain.jobs import ENDED, JobSpec
from unicron_lib.errors import StoreError
from unicron_lib.journal import Journal
from unicron_lib.planning import milp
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.plan_table import key_of

ENDLESS = 10**6
TABLES = {"a": {2: 2.0e9, 4: 3.6e9, 6: 4.4e9}, "b": {2: 1.0e9, 4: 1.8e9}, "c": {1: 0.5e9, 2: 0.9e9, 3: 1.2e9}}
POOLS = ("fast", "fast", "fast", "slow", "slow")
"""Of the nodes, in storms with pools: there `a` runs in both, `b` in both and slowly in one, `c` in one alone."""
BUDGET = {"max_restarts": 2, "restart_window_s": 600.0}
_known: dict[object, Allocation] = {}


def share(request: Request) -> Allocation:
    """The production allocation, by its dynamic programme alone; what is asked again, in any storm, is not solved again."""
    key = key_of(request)
    if key not in _known:
        _known[key] = allocate(request, timer=lambda: 0.0, solve=_nobody)
    return _known[key]


def _nobody(*_: object, time_limit_s: float) -> milp.Solution:
    return milp.Solution(counts=None, proved=False, status="not asked")


@dataclass(eq=False)
class World:
    """Everything of one storm, from its seed. In some the nodes are of two pools, in some the short job has a budget."""

    seed: int
    gpus_per_node: int = 2
    recoveries: list[Recovery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed)
        self.has_pools, self.has_budget = self.seed % 20 == 3, self.kernel.rng.random() < 0.3
        self.network = Network(self.kernel)
        self.witness = Witness(self.kernel)
        self.store = Store(self.kernel, self.witness)
        it = {"kernel": self.kernel, "network": self.network, "store": self.store, "witness": self.witness}
        pools = POOLS if self.has_pools else ("",) * len(POOLS)
        of = {"num_gpus": self.gpus_per_node, **it}
        self.nodes = {f"n{number}": Node(name=f"n{number}", pool=pool, **of) for number, pool in enumerate(pools)}
        self.training = Training(self.kernel, self.store, self.nodes)
        self.controller = Controller(self.kernel, self.network, self.store, self.nodes, self.training.stepping)
        self.healths = [Health(self.kernel, self.store, self.controller, age_s) for age_s in (0.0, ORPHAN_AGE_S)]
        for name in ("recovery-1", "recovery-2"):
            self.recoveries.append(Recovery(name, self.kernel, self.store, self.controller, share, self.training.progress))
        for node in self.nodes.values():
            self.kernel.start(node.name, node.work(self.controller))
        self.person = Journal(self.store)

    @property
    def clocks(self) -> list[object]:
        hosts = (*self.nodes.values(), self.controller, *self.healths, *self.recoveries, self.training)
        return [host.clock for host in hosts]

    # --- what a person does

    def submit(self, name: str) -> None:
        """Again and again until the store takes it."""
        self.kernel.start("person", self._insist(lambda: self._submit(name)))

    def cancel(self, name: str, again_s: float) -> None:
        """End a job, whatever happens to it just now, and submit it anew later."""
        self.kernel.start("person", self._changed_mind(name, again_s))

    def repair(self) -> Work:
        """After the storm: look at the breaker, and at nodes that are isolated, every few seconds."""
        while True:
            yield 5.0
            try:
                state = self.person.refresh()
                at = self.recoveries[0].clock()
                if state.breaker_since is not None:
                    self.person.append(BreakerReset(id=f"reset/{state.seq}", at=at))
                for node in state.nodes.values():
                    if node.status is NodeStatus.QUARANTINED:
                        self.nodes[node.id].broken.clear()
                        self.person.append(NodeReleased(id=f"released/{node.id}/{state.seq}", at=at, node=node.id))
            except StoreError:
                continue

    def _insist(self, what: Callable[[], object]) -> Work:
        while True:
            yield 0.0
            try:
                what()
            except StoreError:
                yield 1.0
            else:
                return

    def _changed_mind(self, name: str, again_s: float) -> Work:
        yield from self._insist(lambda: self._cancel(name))
        yield again_s
        yield from self._insist(lambda: self._submit(name))

    def _cancel(self, name: str) -> None:
        job = self.person.refresh().jobs.get(name)
        if job:
            id_ = f"cancelled/{name}/{job.submission}"
            self.person.append(JobCancelled(id=id_, at=self.recoveries[0].clock(), job=name, submission=job.submission))

    def _submit(self, name: str) -> None:
        job = self.person.refresh().jobs.get(name)
        if job is None or job.status in ENDED:
            number = int(job.submission) + 1 if job else 0
            self.person.append(submitted(self._spec(name), submission=str(number), at=self.recoveries[0].clock()))

    def _spec(self, name: str) -> JobSpec:
        table = TABLES[name]
        budget = BUDGET if name == SHORT and self.has_budget else {"max_restarts": ENDLESS, "restart_window_s": 0.0}
        return JobSpec(
            job=name,
            min_gpus=min(table),
            max_gpus=max(table),
            transition_s=2.0,
            train_iters=SHORT_ITERS if name == SHORT else ENDLESS,
            save_interval=SAVE_INTERVAL,
            loss_spike_patience_iters=1,
            **budget,
            **(_by_pool(name) if self.has_pools else {"throughput_flops": table}),
        )


def _by_pool(name: str) -> dict[str, object]:
    table = TABLES[name]
    slower = {gpus: flops * (0.5 if name == "b" else 0.9) for gpus, flops in table.items()}
    if name == SHORT:
        return {"pool": "slow", "throughput_flops": slower}
    return {"throughput_by_pool": {"fast": table, "slow": slower}}
