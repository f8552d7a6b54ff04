"""A job of cut replicas in one process whose ranks keep their parts of the state in the memory of two nodes."""

from dataclasses import replace
from pathlib import Path

from elastic_world import CountingReplica, Generation, World, small_job
from layout_world import replicas_of

from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.planning.memory import HeldSlot, MemorySource, choose
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.keeping import begin_from_slot
from unicron_lib.training.link import AgentLink
from unicron_lib.training.snapshots import Snapshots

NODES = ("node-0", "node-1")


def kept_job(tp: int, pp: int, **changes) -> JobSpec:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "min_gpus": tp * pp}
    values = {"num_layers": 2, "train_iters": 5, "save_interval": 1000, "memory_interval": 1}
    return small_job(**values | sizes | changes)


class Prompt(Snapshots):
    """Its copies are complete at once, unless it is to be slow: then the last one never is."""

    is_slow = False

    @property
    def is_busy(self) -> bool:
        self.settle()
        return self.is_slow


class KeptWorld(World):
    """`slot` is what the next generation begins from, `keeps` is what each rank is told. Both nodes have each part in turn."""

    def __init__(self, spec: JobSpec, directory: Path, *, replicas: int = 4, keeps: int = 1) -> None:
        layout = replace(spec.layout(1), dp=replicas)
        super().__init__(spec, directory / "ledger", replicas_of(spec, layout, CountingReplica))
        self.houses = {node: SlotHouse(directory / node) for node in NODES}
        self.slot: tuple[int, int] | None = None
        self.keeps = keeps

    def lose_all(self) -> None:
        """All processes are gone."""
        for memory in self.people.values():
            self._pool[memory.replica.siblings.place].append(memory.replica)
        self.people.clear()

    def find(self) -> MemorySource | None:
        """What the nodes have in their memory, as a transition looks for it."""
        found = {node: house.compared(self.spec.job)[0] for node, house in self.houses.items()}
        slots = [
            HeldSlot(node=node, place=header.place, num_bytes=header.num_bytes, part=header.part)
            for node, headers in found.items()
            for header in headers
        ]
        homes = dict.fromkeys(self._layout.parts, NODES)
        return choose(slots, homes, floor=0, saved=None, racks={})

    def _rank(self, room, rank: int, name: int, link: AgentLink) -> bool:
        memory, env = self.people[name], self._environment(rank, room.size, node="")
        part, house = self._layout.part(rank), self.houses[env.node]
        travelling = house.travelling(self.spec.job, part)
        memory.snapshots = Prompt(house.pair(self.spec.job, part), self.spec, travelling=travelling)
        begin_from_slot(memory, env, fallback_iteration=self.checkpoints.iteration)
        return super()._rank(room, rank, name, link)

    def _environment(self, rank: int, size: int, *, node: str) -> RankEnvironment:
        node = NODES[(rank // self._layout.replica_size + rank) % 2]
        return replace(super()._environment(rank, size, node=node), memory_slot=self.slot, keeps=self.keeps)


def one(**keys) -> Generation:
    return Generation(size=1, **keys)
