"""A job whose ranks die, park, come and go, in one process: real replicas, loops and hand-overs, over peers in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from memory_peers import Fault, Killed, Room
from stage import Stage
from torch.distributed import HashStore

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import Progress, from_rank
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout, Place
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.groups import Bulletin, Meeting, members_of
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
    """What the next generation is like: its replicas, who of the survivors sits it out, how they are numbered, what happens."""

    size: int
    faults: tuple[Fault, ...] = ()
    absent: frozenset[int] = frozenset()
    turn: int = 0
    seed: int = 0


class CountingReplica(Replica):
    """Remembers which micro-batches it has computed."""

    computed: list[tuple[int, int]]

    def forward(self, batch, arrived) -> torch.Tensor:
        self.computed.append((batch.iteration, batch.number))
        return super().forward(batch, arrived)


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

    def send_line(self, line: bytes) -> None:
        self._said.append(from_rank.validate_json(line))
        self._pass_point()

    def _pass_point(self) -> None:
        fault = self._room.pass_point(self._rank)
        if fault and fault.moment != "before":
            self._room.strike(fault)


@dataclass
class Checkpoints:
    """The newest complete checkpoint: what the ranks of a replica have saved of it, by their places."""

    iteration: int = -1
    generation: int = -1
    loss: float = 0.0
    state: dict[Place, dict[str, torch.Tensor]] = field(default_factory=dict)
    saves: list[int] = field(default_factory=list)
    begun: dict[tuple[int, int], dict[Place, dict[str, torch.Tensor]]] = field(default_factory=dict)


@dataclass
class Saving:
    """One rank's way to save: those of the first replica do."""

    checkpoints: Checkpoints
    layout: Layout
    place: Place

    is_stale = is_busy = False

    def begin(self, position, state) -> None:
        if self.place.dp:
            return
        parts = self.checkpoints.begun.setdefault((position.iteration, position.generation), {})
        parts[self.place] = {name: tensor.clone() for name, tensor in state.items()}
        if len(parts) == self.layout.replica_size:
            self.checkpoints.saves.append(position.iteration)
            self.checkpoints.iteration, self.checkpoints.loss = position.iteration, position.loss
            self.checkpoints.generation = position.generation
            self.checkpoints.state = parts


class World:
    """A job over all its generations. `people` are the processes that live, by a number of their own.

    `done_again` are iterations that a replica had completed which lived on as a whole.
    """

    def __init__(self, spec: JobSpec, directory: Path, pool: list[CountingReplica]) -> None:
        self.spec, self.directory = spec, directory
        self.people: dict[int, Memory] = {}
        self.checkpoints = Checkpoints()
        self.generation = 0
        self.fired: list[Fault] = []
        self.said: list[Progress] = []
        self.recomputed: list[tuple[int, int]] = []
        self.sat_out: set[int] = set()
        self.done_again: list[int] = []
        self._replicas: list[list[int]] = []
        self._layout = spec.layout(1)
        self._pool: dict[Place, list[CountingReplica]] = {}
        for replica in pool:
            self._pool.setdefault(replica.siblings.place, []).append(replica)
        self._born = 0

    def live(self, plan: Generation) -> bool:
        """Let a generation live until it ends; whether the job is finished."""
        self.generation += 1
        members = self._members(plan)
        held, reached, told = self._held(members), self._reached(members), len(self.said)
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
        news = self.said[told:]
        self.done_again += [progress.iteration for progress in news if progress.iteration <= reached]
        size = self._layout.replica_size
        self._replicas = [list(members[first : first + size]) for first in range(0, len(members), size)] if news else []
        for rank, name in enumerate(members):
            self.recomputed += [done for done in self.people[name].replica.computed if done in held]
            if isinstance(outcomes[rank], Killed):
                replica = self.people.pop(name).replica
                self._pool[replica.siblings.place].append(replica)
            elif not isinstance(outcomes[rank], CollectiveFailed | Parked | bool):
                raise outcomes[rank]
        return all(outcome is True for outcome in outcomes.values())

    def _rank(self, room: Room, rank: int, name: int, link: FakeLink) -> bool:
        env = self._environment(rank, room.size, node=f"node-{name % 2}")
        memory = self.people[name]
        groups = {group: room.peers(rank, members) for group, members in members_of(env.layout, rank).items()}
        try:
            origin = hand_over(
                room.peers(rank),
                memory,
                node=env.node,
                generation=self.generation,
                num_micro_batches=self.spec.num_micro_batches,
                fallback=self._fallback(memory),
            )
            loop = Loop(
                env,
                memory=memory,
                meeting=Meeting(peers=room.peers(rank), bulletin=Bulletin(HashStore()), **groups),
                work=Work(self.spec, replica=env.place.dp, num_replicas=env.layout.dp),
                saver=Saving(self.checkpoints, env.layout, env.place),
                link=link,
                beats=BeatWriter(None),
                origin=origin,
            )
            siblings = memory.replica.siblings.met(line=groups["line"], replica=groups["replica"])
            with siblings, Ledger(self.directory, generation=self.generation, rank=rank) as ledger:
                return loop.run(ledger)
        finally:
            room.leave(rank)

    def _fallback(self, memory: Memory) -> Fallback:
        saved = replace(self.checkpoints)

        def load() -> float:
            memory.replica.load(saved.state[memory.replica.siblings.place])
            return saved.loss

        name = "" if saved.iteration < 0 else "manifest"
        return Fallback(iteration=saved.iteration, name=name, load=load, generation=saved.generation)

    def _members(self, plan: Generation) -> Sequence[int]:
        """Processes for all ranks: whoever has a place keeps it, in whatever replica."""
        present = [name for number, name in enumerate(sorted(self.people)) if number not in plan.absent]
        columns = [self._column(present, plan.size, rank) for rank in range(self._layout.replica_size)]
        turn = plan.turn % plan.size
        turned = (column[turn:] + column[:turn] for column in columns)
        return [name for replica in zip(*turned, strict=True) for name in replica]

    def _column(self, present: Sequence[int], size: int, rank: int) -> list[int]:
        place = self._layout.place(rank)
        own = [name for name in present if self.people[name].replica.siblings.place == place][:size]
        return own + [self._newcomer(place) for _ in range(size - len(own))]

    def _newcomer(self, place: Place) -> int:
        """A process with a replica that holds nothing of use."""
        replica = self._pool[place].pop()
        with replica.filling() as flats:
            for flat in (*flats, replica.buffer):
                flat.fill_(float("nan"))
        self._born += 1
        self.people[self._born] = Memory(replica=replica)
        return self._born

    def _reached(self, members: Sequence[int]) -> int:
        """The last iteration that a rank has completed whose replica has come out of the last generation's training whole."""
        whole = (replica for replica in self._replicas if set(replica) <= set(members))
        return max((self.people[name].position.iteration for replica in whole for name in replica), default=-1)

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
            tp=self._layout.tp,
            pp=self._layout.pp,
        )


def state_of(replica: Replica) -> tuple[torch.Tensor, ...]:
    with replica.filling() as flats:
        return tuple(flat.clone() for flat in flats)
