"""A node of a storm: an agent with the production outbox, window, fence and memo, and ranks that only count iterations."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from storm_kernel import HostClock, Kernel, Network, Work
from storm_store import Store
from storm_witness import Broken, Witness

from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memo import StepMemo
from unicron_lib.agent.messages import (
    AgentHello,
    DrainRanks,
    Heartbeat,
    HoldRanks,
    LaunchRanks,
    Observation,
    RankExited,
    RankInfo,
    Reply,
    SaveReplica,
    StopRanks,
)
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.agent.window import Window
from unicron_lib.domain.skipping import Ranges
from unicron_lib.errors import AgentError

ECHO = ("DistBackendError", "NCCL error: remote process exited or there was a network error")


@dataclass(eq=False)
class Rank:
    """`phase` is running, stalled, parked, drained, or dead. A parked one may live on in the generation `held_for`.

    `batches` are those that its parameters have learned from, one an iteration; it leaves out those in `skipped`.
    """

    job: str
    generation: int
    rank: int
    world_size: int
    batches: tuple[int, ...]
    skipped: Ranges = ()
    phase: str = "running"
    told: bool = False
    held_for: int = 0
    has_stepped: bool = False

    @property
    def iteration(self) -> int:
        return len(self.batches) - 1


@dataclass(eq=False)
class Node:
    """A machine with its agent; `gpus` holds what runs on each. A rank on a GPU that is `broken` dies at once."""

    name: str
    num_gpus: int
    kernel: Kernel
    network: Network
    store: Store
    witness: Witness
    pool: str = ""
    is_up: bool = True
    is_cut_off: bool = False
    life: int = 0
    gpus: dict[int, Rank] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    link: int = 0
    heard_s: float = 0.0
    effects: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    said: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = HostClock(self.kernel)
        self.begin_life()

    def begin_life(self) -> None:
        """Nothing of the life before is left but its number."""
        self.life += 1
        boot = f"{self.name}-{self.life}"
        self.outbox, self.fence, self.memo, self.link = Outbox(node=self.name, boot=boot), Fence(), StepMemo(), 0
        self.launchable = Fence()
        self.effects, self.ended, self.said = {}, {}, []
        self.gpus.clear()

    @property
    def hello(self) -> AgentHello:
        of = {"node": self.name, "boot": self.outbox.boot, "address": self.name, "pool": self.pool}
        return AgentHello(**of, num_gpus=self.num_gpus, ranks=self.ranks)

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        live = [(gpu, rank) for gpu, rank in sorted(self.gpus.items()) if rank.phase != "dead"]
        return tuple(RankInfo(job=r.job, generation=r.generation, rank=r.rank, pid=1, gpu=gpu) for gpu, r in live)

    def observe(self, body: object) -> None:
        if self.is_up:
            self.said.append(self.outbox.add(body, at=self.clock()))

    # --- the connection

    def work(self, controller: "object") -> Work:
        """Dial, tell, and beat; a connection that has lost something is given up."""
        beat_s = 0.0
        while True:
            yield 0.2
            if not self.is_up:
                continue
            if not self.link:
                self._dial(controller)
            elif self.kernel.now >= beat_s:
                beat_s = self.kernel.now + 1.0
                self._send(controller, Heartbeat(at=self.clock(), ranks=self.ranks))
            if self.link and len(self.outbox):
                for observation in self.window.take():
                    self._send(controller, observation)

    def _dial(self, controller: "object") -> None:
        if self.is_cut_off or not controller.is_up:
            return
        self.link = controller.accept(self)
        self.window = Window(self.outbox)

    def _send(self, controller: "object", message: object) -> None:
        link, boot = self.link, self.outbox.boot
        self.network.carry(lambda: self.is_cut_off or controller.hear(self, link, boot, message), lambda: self.hang_up(link))

    def hang_up(self, link: int) -> None:
        """The connection is broken; the next one tells all again that was not acknowledged."""
        if self.link == link:
            self.link = 0

    def acknowledged(self, link: int, seqs: tuple[int, ...]) -> None:
        if self.link == link:
            self.window.acknowledge(seqs)

    # --- commands

    def answer(self, command: object) -> Reply:
        """As `agent.commands` does it: admit, recall or do, keep."""
        generation = _generation_of(command)
        is_parted = isinstance(command, LaunchRanks) and not self.launchable.admits(command.job, generation)
        if is_parted or not self.fence.admits(command.job, generation):
            return Reply(step=command.step, ok=False, error=self.fence.refusal(command.job, generation), stale=True)
        if isinstance(command, LaunchRanks | StopRanks):
            self.fence.raise_to(command.job, generation)
        if isinstance(command, DrainRanks | HoldRanks):
            self.launchable.raise_to(command.job, generation)
        reply = self.memo.recall(command.step)
        if reply is None:
            reply = self._done(command)
            if reply.ok:  # who could not do it may be asked again
                self.memo.keep(reply)
        return reply

    def _done(self, command: object) -> Reply:
        try:
            return Reply(step=command.step, ok=True, result=self._do(command))
        except AgentError as error:
            self.effects[command.step] -= 1
            return Reply(step=command.step, ok=False, error=str(error))

    def _do(self, command: object) -> dict[str, object]:
        known = self.witness.state.jobs[command.job].generation
        generation = _generation_of(command)
        if generation > known:
            raise Broken(f"{self.name} carries out {command.step} for generation {generation}, the journal has {known}")
        self.effects[command.step] = self.effects.get(command.step, 0) + 1
        if self.effects[command.step] > 1:
            raise Broken(f"{command.step} has its effect a second time on {self.name}")
        match command:
            case LaunchRanks():
                return {"pids": [{"rank": rank} for rank in self._launch(command)]}
            case StopRanks():
                return {"stopped": len(self._stop(command))}
            case DrainRanks():
                return {"ranks": self._drain(command)}
            case HoldRanks():
                return {"ranks": self._hold(command)}
            case SaveReplica():
                return self._save_replica(command)

    def _launch(self, command: LaunchRanks) -> Iterator[int]:
        if command.generation < self.ended.get(command.job, 0):
            raise Broken(f"{self.name} launches {command.job} generation {command.generation}, which it had to end before")
        self.kernel.tell(f"{self.name} launches {command.job} generation {command.generation}, ranks {command.ranks}")
        for rank, gpu in command.ranks:
            held = self.gpus.get(gpu)
            if held and (held.job, held.phase, held.held_for) == (command.job, "parked", command.generation):
                self._adopt(command, rank, held)
                yield rank
                continue
            if held and held.phase != "dead":
                self._find_left_behind(command, held)
            found = self.store.load(command.job, command.restore_from)
            self._refuse_another_submission(command, found.generation if found.batches else command.generation)
            self.gpus[gpu] = Rank(command.job, command.generation, rank, command.world_size, found.batches, command.skipped)
            yield rank
        for gpu in self._below(command.job, command.generation):
            if self.gpus[gpu].held_for:
                del self.gpus[gpu]

    def _refuse_another_submission(self, command: LaunchRanks, origin: int) -> None:
        """What a job has learned under an earlier submission is not gone on from."""
        begins_with = self.witness.begins_with[command.job]
        if origin < begins_with <= command.generation:
            raise Broken(f"{command.job} generation {command.generation} goes on from {origin}, of an earlier submission")

    def _adopt(self, command: LaunchRanks, rank: int, held: Rank) -> None:
        self._refuse_another_submission(command, held.generation)
        self.kernel.tell(f"{self.name}: rank {held.rank} of {held.job}, at iteration {held.iteration}, lives on")
        held.generation, held.rank, held.world_size = command.generation, rank, command.world_size
        held.phase, held.told, held.skipped, held.has_stepped = "running", False, command.skipped, False
        self.witness.seen["rank that lives on"] += 1

    def _find_left_behind(self, command: LaunchRanks, held: Rank) -> None:
        newest = self.witness.state.jobs[held.job].generation
        if held.generation == newest:
            raise Broken(f"{self.name} launches {command.job} generation {command.generation} where {held} lives")
        text = f"{held.job} generation {held.generation} (newest {newest}) was left behind on {self.name}"
        self.kernel.tell(f"{text}, found by {command.job} generation {command.generation}")
        self.witness.left_behind.append(text)

    def _below(self, job: str, floor: int) -> list[int]:
        return [gpu for gpu, rank in self.gpus.items() if rank.job == job and rank.generation < floor]

    def _drain(self, command: DrainRanks) -> list[dict[str, object]]:
        """Who trains saves at the end of the iteration, if the store takes it; who does not yet has nothing to save."""
        told = []
        for gpu in self._below(command.job, command.below_generation):
            rank = self.gpus[gpu]
            trains = rank.phase == "running" and rank.has_stepped
            made = self.store.save(rank.job, rank.generation, rank.batches) if trains else None
            if trains:
                rank.phase = "drained" if made else "parked"
            state = rank.phase if rank.phase in {"drained", "parked"} else "gone"
            told.append({**_described(rank, state), "manifest": made.key if made else None})
        self.kernel.tell(f"{self.name} drains {command.job} below generation {command.below_generation}: {told}")
        return told

    def _save_replica(self, command: SaveReplica) -> dict[str, object]:
        who = (command.job, command.generation, command.rank)
        found = [it for it in self.gpus.values() if (it.job, it.generation, it.rank) == who and it.phase == "parked"]
        if not found:
            raise AgentError(f"rank {command.rank} of job {command.job} does not wait on this node: take another one")
        made = self.store.save(command.job, command.as_generation, found[0].batches)
        if made is None:
            raise AgentError(f"rank {command.rank} of job {command.job} could not save: take another one")
        self.kernel.tell(f"{self.name}: rank {command.rank} of {command.job} saves its replica, {made.key}")
        self.witness.seen["replica saved"] += 1
        return {"iteration": made.iteration, "manifest": made.key}

    def _hold(self, command: HoldRanks) -> list[dict[str, object]]:
        """As `agent.holding` does it: who hangs is killed, all others park."""
        told = []
        for gpu in self._below(command.job, command.below_generation):
            rank = self.gpus[gpu]
            hangs = rank.phase == "stalled" and (rank.rank in command.condemned or self.kernel.rng.random() < 0.5)
            if rank.phase != "dead":
                rank.phase, rank.held_for = ("dead", 0) if hangs else ("parked", max(rank.held_for, command.below_generation))
            state = "parked" if rank.phase == "parked" else "gone"
            told.append({**_described(rank, state), "manifest": None, "gpu": gpu, "micro_batches": 0})
        self.kernel.tell(f"{self.name} holds {command.job} below generation {command.below_generation}: {told}")
        return told

    def _stop(self, command: StopRanks) -> list[int]:
        below, floor = self._below(command.job, command.below_generation), command.below_generation
        gone = [gpu for gpu in below if self.gpus[gpu].held_for < floor + (gpu not in command.keep_gpus)]
        self.witness.part(
            self.name, command, {gpu: self.gpus[gpu].held_for for gpu in gone if self.gpus[gpu].phase == "parked"}
        )
        self.ended[command.job] = max(self.ended.get(command.job, 0), command.below_generation)
        self.kernel.tell(f"{self.name} stops {command.job} below generation {command.below_generation}: GPUs {gone}")
        for gpu in gone:
            del self.gpus[gpu]
        return gone

    # --- ranks

    def die(self, gpu: int, exit_code: int = -9) -> None:
        rank = self.gpus.get(gpu)
        if rank is None or rank.phase == "dead":
            return
        rank.phase = "dead"
        self.kernel.tell(f"{self.name}: rank {rank.rank} of {rank.job} generation {rank.generation} dies ({exit_code})")
        it = {"job": rank.job, "generation": rank.generation, "rank": rank.rank, "iteration": rank.iteration}
        self.observe(RankExited(**it, pid=1, exit_code=exit_code))

    def fail(self, gpu: int, error_type: str, message: str) -> None:
        """An exception in a rank, which parks."""
        rank = self.gpus.get(gpu)
        if rank is None or rank.phase == "dead" or rank.told:
            return
        rank.phase, rank.told = "parked", True
        self.kernel.tell(f"{self.name}: rank {rank.rank} of {rank.job} generation {rank.generation}: {error_type}: {message}")
        it = {"job": rank.job, "generation": rank.generation, "rank": rank.rank, "iteration": rank.iteration}
        self.observe(RankFailed(**it, error_type=error_type, message=message, traceback="", parked=True))


def _generation_of(command: object) -> int:
    match command:
        case LaunchRanks():
            return command.generation
        case SaveReplica():
            return max(command.generation, command.as_generation)
        case _:
            return command.below_generation


def _described(rank: Rank, state: str) -> dict[str, object]:
    return {"rank": rank.rank, "generation": rank.generation, "state": state, "iteration": rank.iteration}
