"""A job of cut replicas in one process whose ranks keep their parts of the state in the memory of two nodes."""

from dataclasses import replace
from pathlib import Path

from elastic_world import CountingReplica, Generation, World, small_job
from layout_world import replicas_of

from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.memory import HeldSlot, Homes, MemorySource, choose
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
    """`slot` is what the next generation begins from, `keeps` is what each rank is told. Both nodes have each part in turn.

    A world in another layout goes on `after` one whose ranks are gone, and begins from what that has left.
    """

    def __init__(
        self, spec: JobSpec, directory: Path, *, replicas: int = 4, keeps: int = 1, after: "KeptWorld | None" = None
    ) -> None:
        layout = replace(spec.layout(1), dp=replicas)
        super().__init__(spec, directory / "ledger", replicas_of(spec, layout, CountingReplica))
        self.houses = {node: SlotHouse(directory / node) for node in NODES}
        self.slot: tuple[int, int] | None = None
        self.kept_in: Layout | None = None
        self.keeps = keeps
        if after is not None:
            self.generation = after.generation

    def lose_all(self) -> None:
        """All processes are gone."""
        for memory in self.people.values():
            self._pool[memory.replica.siblings.place].append(memory.replica)
        self.people.clear()

    def begin_from_memory(self, *, size: int) -> MemorySource:
        """What the nodes have is to be begun from, and comes to where so many replicas need it."""
        homes: dict[str, list[str]] = {part: [] for part in self._layout.parts}
        for rank in range(size * self._layout.replica_size):
            homes[self._layout.part(rank)].append(self._node(rank))
        source = self.find(homes)
        assert source is not None
        for fetch in source.fetches:
            with self.houses[fetch.holders[0]].all_of(self.spec.job, fetch.part).reading(source.place) as (header, data):
                claim = self.houses[fetch.to].pair(self.spec.job, fetch.part).claim(len(data))
                claim.data[:] = data
                claim.commit(header)
        self.slot, self.kept_in = source.place, source.layout
        return source

    def find(self, homes: Homes | None = None) -> MemorySource | None:
        """What the nodes have in their memory, as a transition looks for it."""
        found = {node: house.compared(self.spec.job)[0] for node, house in self.houses.items()}
        slots = [
            HeldSlot(node=node, place=header.place, num_bytes=header.num_bytes, part=header.part)
            for node, headers in found.items()
            for header in headers
        ]
        return choose(slots, homes or dict.fromkeys(self._layout.parts, NODES), floor=0, saved=None, racks={})

    def _rank(self, room, rank: int, name: int, link: AgentLink) -> bool:
        memory, env = self.people[name], self._environment(rank, room.size, node="")
        part, house = self._layout.part(rank), self.houses[env.node]
        travelling = house.travelling(self.spec.job, part)
        memory.snapshots = Prompt(house.pair(self.spec.job, part), self.spec, travelling=travelling)
        begin_from_slot(memory, env, fallback_iteration=self.checkpoints.iteration)
        return super()._rank(room, rank, name, link)

    def _environment(self, rank: int, size: int, *, node: str) -> RankEnvironment:
        told = {"memory_slot": self.slot, "memory_layout": self.kept_in, "keeps": self.keeps}
        return replace(super()._environment(rank, size, node=self._node(rank)), **told)

    def _node(self, rank: int) -> str:
        return NODES[(rank // self._layout.replica_size + rank) % 2]


def one(**keys) -> Generation:
    return Generation(size=1, **keys)
