"""A job whose ranks die, park, come and go, in one process: real replicas, loops and hand-overs, over peers in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from memory_peers import Fault, Killed, Room
from stage import Stage

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.handover import Fallback, Memory, hand_over
from unicron_lib.training.ledger import Ledger
from unicron_lib.training.loop import Loop, Work
from unicron_lib.training.peers import CollectiveFailed, Parked
from unicron_lib.training.replica import Replica

CPU = torch.device("cpu")


def small_job(**changes) -> JobSpec:
    values = {
        "job": "tiny",
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "global_batch_size": 8,
        "train_iters": 4,
        "save_interval": 2,
        "log_interval": 1000,
        "params_dtype": "float64",
        "hidden_dropout": 0.1,
    }
    return JobSpec(**values | changes)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the next generation is like: its size, who of the survivors sits it out, how ranks are numbered, what happens."""

    size: int
    faults: tuple[Fault, ...] = ()
    absent: frozenset[int] = frozenset()
    turn: int = 0
    seed: int = 0


class CountingReplica(Replica):
    """Remembers which micro-batches it has computed."""

    computed: list[tuple[int, int]]

    def add_micro_batch(self, samples, tokens, *, iteration, first) -> None:
        self.computed.append((iteration, first // len(samples)))
        super().add_micro_batch(samples, tokens, iteration=iteration, first=first)


class FakeLink:
    """A rank's orders, and the points between its calls of others at which something may happen to it."""

    def __init__(self, room: Room, rank: int, said: list[Progress]) -> None:
        self._room, self._rank, self._said = room, rank, said
        self.is_draining = self.is_parking = False
        self.take_save = lambda: False
        self.slowness = 1.0

    @property
    def wants_park(self) -> bool:
        self._pass_point()
        return self._room.is_cut

    def take_fault(self) -> None:
        self._pass_point()

    def send(self, message: Progress) -> None:
        self._said.append(message)
        self._pass_point()

    def _pass_point(self) -> None:
        fault = self._room.pass_point(self._rank)
        if fault and fault.moment != "before":
            self._room.strike(fault)


@dataclass
class Checkpoints:
    """The newest complete checkpoint."""

    iteration: int = -1
    loss: float = 0.0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    saves: list[int] = field(default_factory=list)

    is_stale = is_busy = False

    def begin(self, position, state) -> None:
        self.saves.append(position.iteration)
        self.iteration, self.loss = position.iteration, position.loss
        self.state = {name: tensor.clone() for name, tensor in state.items()}


class World:
    """A job over all its generations. `people` are the processes that live, by a number of their own."""

    def __init__(self, spec: JobSpec, directory: Path, pool: list[CountingReplica]) -> None:
        self.spec, self.directory = spec, directory
        self.people: dict[int, Memory] = {}
        self.checkpoints = Checkpoints()
        self.generation = 0
        self.fired: list[Fault] = []
        self.said: list[Progress] = []
        self.recomputed: list[tuple[int, int]] = []
        self.sat_out: set[int] = set()
        self._pool = list(pool)
        self._born = 0

    def live(self, plan: Generation) -> bool:
        """Let a generation live until it ends; whether the job is finished."""
        self.generation += 1
        members = self._members(plan)
        held = self._held(members)
        self.sat_out |= self.people.keys() - set(members)
        for name in members:
            self.people[name].replica.computed = []
        stage = Stage(plan.seed)
        room = Room(stage, len(members), plan.faults)
        links = [FakeLink(room, rank, self.said) for rank in range(room.size)]
        room.on_park = lambda: [setattr(link, "is_parking", True) for link in links]
        outcomes = stage.run(
            {rank: lambda r=rank, n=name: self._rank(room, r, n, links[r]) for rank, name in enumerate(members)}
        )
        self.fired += room.fired
        for rank, name in enumerate(members):
            self.recomputed += [done for done in self.people[name].replica.computed if done in held]
            if isinstance(outcomes[rank], Killed):
                self._pool.append(self.people.pop(name).replica)
            elif not isinstance(outcomes[rank], CollectiveFailed | Parked | bool):
                raise outcomes[rank]
        return all(outcome is True for outcome in outcomes.values())

    def _rank(self, room: Room, rank: int, name: int, link: FakeLink) -> bool:
        env = self._environment(rank, room.size, node=f"node-{name % 2}")
        memory = self.people[name]
        peers = room.peers(rank)
        try:
            origin = hand_over(
                peers,
                memory,
                node=env.node,
                generation=self.generation,
                num_micro_batches=self.spec.num_micro_batches,
                fallback=self._fallback(memory),
            )
            loop = Loop(
                env,
                memory=memory,
                peers=peers,
                work=Work(self.spec, rank=rank, world_size=room.size),
                saver=self.checkpoints if rank == 0 else SimpleNamespace(is_stale=False, is_busy=False, begin=lambda *_: None),
                link=link,
                beats=BeatWriter(None),
                origin=origin,
            )
            with Ledger(self.directory, generation=self.generation, rank=rank) as ledger:
                return loop.run(ledger)
        finally:
            room.leave(rank)

    def _fallback(self, memory: Memory) -> Fallback:
        saved = Checkpoints(self.checkpoints.iteration, self.checkpoints.loss, self.checkpoints.state)

        def load() -> float:
            memory.replica.load(saved.state)
            return saved.loss

        return Fallback(iteration=saved.iteration, name="" if saved.iteration < 0 else "manifest", load=load)

    def _members(self, plan: Generation) -> Sequence[int]:
        present = [name for place, name in enumerate(sorted(self.people)) if place not in plan.absent][: plan.size]
        while len(present) < plan.size:
            present.append(self._newcomer())
        turn = plan.turn % plan.size
        return present[turn:] + present[:turn]

    def _newcomer(self) -> int:
        """A process with a replica that holds nothing of use."""
        replica = self._pool.pop()
        with replica.filling() as flats:
            for flat in (*flats, replica.buffer):
                flat.fill_(float("nan"))
        self._born += 1
        self.people[self._born] = Memory(replica=replica)
        return self._born

    def _held(self, members: Sequence[int]) -> set[tuple[int, int]]:
        """The micro-batches of the iteration under way that are in a member's memory, with the newest state."""
        whole = [memory for name in members if (memory := self.people[name]).position.is_whole]
        newest = max(((m.position.iteration, m.position.generation) for m in whole), default=None)
        return {
            (memory.effort.iteration, micro_batch)
            for memory in whole
            if (memory.position.iteration, memory.position.generation) == newest
            and memory.effort.iteration == memory.position.iteration + 1
            for micro_batch in memory.effort.done
        }

    def _environment(self, rank: int, size: int, *, node: str) -> RankEnvironment:
        return RankEnvironment(
            spec=self.spec,
            generation=self.generation,
            rank=rank,
            world_size=size,
            local_rank=rank,
            master_addr="",
            master_port=0,
            node=node,
            run_dir=self.directory,
            agent_socket="",
            store_url="",
        )


def state_of(replica: Replica) -> tuple[torch.Tensor, ...]:
    with replica.filling() as flats:
        return tuple(flat.clone() for flat in flats)
