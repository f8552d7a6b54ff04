"""The cluster of a storm: nodes, jobs that train on them, the processes that heal them, and a person."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from storm_control import ORPHAN_AGE_S, Controller, Health
from storm_kernel import Kernel, Network, Work
from storm_node import ECHO, Node, Rank
from storm_recovery import Recovery
from storm_store import Store, Witness

from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.controller.liveness import Stepping
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import BreakerReset, NodeReleased, submitted
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import StoreError
from unicron_lib.journal import Journal
from unicron_lib.planning import milp
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.plan_table import key_of

ENDLESS = 10**6
ITERATION_S, SAVE_INTERVAL = 0.5, 8
TABLES = {"a": {2: 2.0e9, 4: 3.6e9, 6: 4.4e9}, "b": {2: 1.0e9, 4: 1.8e9}, "c": {1: 0.5e9, 2: 0.9e9, 3: 1.2e9}}
SHORT = "c"
"""The job that comes to its end within a storm, if nothing holds it up for long."""
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
    """Everything of one storm, from its seed."""

    seed: int
    num_nodes: int = 5
    gpus_per_node: int = 2
    recoveries: list[Recovery] = field(default_factory=list)
    steps: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed)
        self.network = Network(self.kernel)
        self.witness = Witness(self.kernel)
        self.store = Store(self.kernel, self.witness)
        names = [f"n{number}" for number in range(self.num_nodes)]
        it = {"kernel": self.kernel, "network": self.network, "store": self.store, "witness": self.witness}
        self.nodes = {name: Node(name=name, num_gpus=self.gpus_per_node, **it) for name in names}
        self.controller = Controller(self.kernel, self.network, self.store, self.nodes, self.stepping)
        self.healths = [Health(self.kernel, self.store, self.controller, age_s) for age_s in (0.0, ORPHAN_AGE_S)]
        for name in ("recovery-1", "recovery-2"):
            self.recoveries.append(Recovery(name, self.kernel, self.store, self.controller, share, self.progress))
        for node in self.nodes.values():
            self.kernel.start(node.name, node.work(self.controller))
        self.kernel.start("training", self._train())
        self.person = Journal(self.store)

    @property
    def clocks(self) -> list[object]:
        hosts = (*self.nodes.values(), self.controller, *self.healths, *self.recoveries)
        return [host.clock for host in hosts]

    def submit(self, name: str) -> None:
        """A person submits a job, again and again until the store takes it."""
        table = TABLES[name]
        spec = JobSpec(
            job=name,
            min_gpus=min(table),
            max_gpus=max(table),
            throughput_flops=table,
            max_restarts=ENDLESS,
            restart_window_s=0.0,
            transition_s=2.0,
            train_iters=60 if name == SHORT else ENDLESS,
        )
        self.insist(lambda: self.person.append(submitted(spec, submission="1", at=self.recoveries[0].clock())))

    def insist(self, what: Callable[[], object]) -> None:
        try:
            what()
        except StoreError:
            self.kernel.later(1.0, lambda: self.insist(what))

    # --- training

    def ranks(self) -> Iterator[tuple[Node, int, Rank]]:
        for node in self.nodes.values():
            for gpu, rank in list(node.gpus.items()):
                if rank.phase != "dead":
                    yield node, gpu, rank

    def progress(self, job: str, generation: int) -> int | None:
        """The last iteration of all ranks of a generation, None before the first."""
        return self.steps.get((job, generation), (None, 0.0))[0]

    def stepping(self, name: str) -> Stepping | None:
        """What ranks elsewhere have lately done together with those of a node that cannot be heard."""
        found = {(rank.job, rank.generation) for _, rank in self.nodes[name].gpus.items()}
        for job, generation in sorted(found):
            iteration, at = self.steps.get((job, generation), (0, -1e9))
            others = [n.name for n, _, r in self.ranks() if r.job == job and n.name != name and n.link]
            if others:
                return Stepping(job=job, iteration=iteration, reporter=others[0], at=at)
        return None

    def _train(self) -> Work:
        while True:
            yield ITERATION_S
            groups: dict[tuple[str, int], list[tuple[Node, int, Rank]]] = {}
            for node, gpu, rank in self.ranks():
                if gpu in node.broken:
                    node.die(gpu, 1)
                else:
                    groups.setdefault((rank.job, rank.generation), []).append((node, gpu, rank))
            for (job, generation), members in groups.items():
                self._iterate(job, generation, members)

    def _iterate(self, job: str, generation: int, members: list[tuple[Node, int, Rank]]) -> None:
        whole = len(members) == members[0][2].world_size
        if whole and all(rank.phase == "running" for _, _, rank in members):
            iteration = max(rank.iteration for _, _, rank in members) + 1  # who is behind has copied the state
            for _, _, rank in members:
                rank.iteration = iteration
            self.steps[job, generation] = iteration, self.kernel.now
            if iteration % SAVE_INTERVAL == 0:
                self.store.save(job, generation, iteration)
            if job == SHORT and iteration >= 59:
                self._finish(members)
        elif (job, generation) in self.steps:  # a peer is gone: who waits for it is told so, sooner or later
            for node, gpu, rank in members:
                if rank.phase == "running" and not whole and self.kernel.rng.random() < 0.5:
                    node.fail(gpu, *ECHO)

    def _finish(self, members: list[tuple[Node, int, Rank]]) -> None:
        for node, _, rank in members:
            it = {"job": rank.job, "generation": rank.generation, "rank": rank.rank, "iteration": rank.iteration}
            rank.phase = "dead"
            node.observe(RankFinished(**it, loss=1.0))

    # --- what a person does

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
