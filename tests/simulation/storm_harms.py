"""What a storm does: each harm by its name, to somebody by chance."""

from collections import Counter
from collections.abc import Callable, Mapping

from storm_node import Node, Rank
from storm_training import SHORT
from storm_world import TABLES, World

from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import GpuFault, RankResumed, RankStalled


class Harms:
    """Done to a world, and counted."""

    def __init__(self, world: World) -> None:
        self.world, self.kernel, self.rng = world, world.kernel, world.kernel.rng
        self.done: Counter[str] = Counter()

    def do(self, harm: str) -> None:
        self.kernel.tell(f"harm: {harm}")
        self.done[harm] += 1
        HARMS[harm](self)

    def _for(self, low_s: float, high_s: float, undo: Callable[[], None]) -> None:
        self.kernel.later(self.rng.uniform(low_s, high_s), undo)

    def _rank(self) -> tuple[Node, int, Rank] | None:
        found = list(self.world.training.ranks())
        return self.rng.choice(found) if found else None

    def _node(self) -> Node:
        return self.rng.choice(list(self.world.nodes.values()))

    # --- to ranks

    def crash(self) -> None:
        if found := self._rank():
            found[0].die(found[1], self.rng.choice((-9, -11, 1)))

    def exception(self) -> None:
        texts = (
            ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
            ("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
            ("DistBackendError", "Connection reset by peer"),
            ("StoreError", "the store is out of reach"),
        )
        if found := self._rank():
            found[0].fail(found[1], *self.rng.choice(texts))

    def stall(self) -> None:
        found = self._rank()
        if found is None or found[2].phase != "running":
            return
        node, _, rank = found
        rank.phase = "stalled"
        it = {"job": rank.job, "generation": rank.generation, "rank": rank.rank, "iteration": rank.iteration}
        pace = {"section": "step", "silent_s": 5.0, "limit_s": 3.0, "usual_s": 1.0, "wait_s": 4.0}
        node.observe(RankStalled(**it, **pace))

        def go_on() -> None:
            if rank.phase == "stalled" and rank in node.gpus.values():
                rank.phase = "running"
                node.observe(RankResumed(**it, silent_s=6.0))

        if self.rng.random() < 0.7:
            self._for(0.5, 6.0, go_on)

    def deadly_batch(self) -> None:
        """Its loss is no number, on all ranks, however often it is read."""
        self.world.training.poison(self.rng.choice(sorted(TABLES)), deadly=True)

    def wrong_batch(self) -> None:
        """The parameters learn from it, save it, and only then does the loss stand out."""
        self.world.training.poison(self.rng.choice(sorted(TABLES)), deadly=False)

    def curse(self) -> None:
        """The ranks of a job die at once; for good if it has a budget of restarts."""
        cursed, name = self.world.training.cursed, self.rng.choice(sorted(TABLES))
        cursed.add(name)
        if not (name == SHORT and self.world.has_budget):
            self._for(1.0, 12.0, lambda: cursed.discard(name))

    def cancel(self) -> None:
        """In the middle of whatever is going on; a new submission follows."""
        self.world.cancel(self.rng.choice(sorted(TABLES)), self.rng.uniform(0.0, 10.0))

    # --- to nodes

    def broken_gpu(self) -> None:
        """Nobody tells: ranks die there, however often they are started."""
        node = self._node()
        node.broken.add(self.rng.randrange(node.num_gpus))

    def gpu_fault(self) -> None:
        """The agent tells, perhaps twice."""
        node = self._node()
        gpu = self.rng.randrange(node.num_gpus)
        node.broken.add(gpu)
        kind = self.rng.choice(("gpu_lost", "ecc_error", "nvlink_error"))
        jobs = _jobs_on(node)
        for _ in range(self.rng.randint(1, 2)):
            node.observe(GpuFault(kind=kind, gpu=gpu, uuid="", evidence="told by the driver", jobs=jobs))

    def node_death(self) -> None:
        node = self.rng.choice([node for node in self.world.nodes.values() if node.is_up] or [None])
        if node is not None:
            self._fell(node)
            self._for(0.5, 20.0, lambda: _boot(node))

    def notice(self) -> None:
        """A node is taken back some time after it has been told so, emptied or not, and another comes under its name."""
        node = self._node()
        life = node.life
        node.observe(NodeLeaving(reason="a spot notice", leaves_at=node.clock() + 20.0, jobs=_jobs_on(node)))

        def go() -> None:
            if node.is_up and node.life == life:
                self._fell(node)
            self._for(0.5, 20.0, lambda: _boot(node))

        self._for(0.0, 20.0, go)

    def flapping(self) -> None:
        """A node that comes and goes."""
        node, at_s = self._node(), 0.0
        for _ in range(3):
            self.kernel.later(at_s, lambda: self._fell(node))
            at_s += self.rng.uniform(0.5, 9.0)
            self.kernel.later(at_s, lambda: _boot(node))
            at_s += self.rng.uniform(1.0, 4.0)

    def _fell(self, node: Node) -> None:
        node.is_up = False
        node.gpus.clear()
        node.link = 0

    def partition(self) -> None:
        node = self._node()
        node.is_cut_off = True
        if self.rng.random() < 0.5:
            node.hang_up(node.link)

        def mend() -> None:
            node.is_cut_off = False
            node.hang_up(node.link)

        self._for(0.5, 15.0, mend)

    # --- to what heals

    def controller_crash(self) -> None:
        if self.world.controller.is_up:
            self.world.controller.crash()
            self._for(0.2, 10.0, self.world.controller.start)

    def recovery_crash(self) -> None:
        self._restarted(self.rng.choice(self.world.recoveries))

    def health_crash(self) -> None:
        self._restarted(self.rng.choice(self.world.healths))

    def _restarted(self, process: object) -> None:
        if not process.process.is_over:
            process.crash()
            self._for(0.0, 8.0, process.start)

    def store_away(self) -> None:
        self.world.store.away = True
        self._for(0.5, 12.0, lambda: setattr(self.world.store, "away", False))

    def store_mumbles(self) -> None:
        self.world.store.mumbling = True
        self._for(0.5, 12.0, lambda: setattr(self.world.store, "mumbling", False))

    def clock_step(self) -> None:
        self.rng.choice(self.world.clocks).offset_s += self.rng.choice((-3600.0, -30.0, -3.0, 3.0, 30.0, 3600.0))


def _jobs_on(node: Node) -> tuple[str, ...]:
    return tuple(sorted({rank.job for rank in node.ranks}))


def _boot(node: Node) -> None:
    if not node.is_up:
        node.begin_life()
        node.is_up = True


HARMS: Mapping[str, Callable[[Harms], None]] = {
    name: getattr(Harms, name)
    for name in (
        *("crash", "exception", "stall", "deadly_batch", "wrong_batch", "curse", "cancel"),
        *("broken_gpu", "gpu_fault", "node_death", "notice", "flapping", "partition"),
        *("controller_crash", "recovery_crash", "health_crash", "store_away", "store_mumbles", "clock_step"),
    )
}
