"""A storm: for a while everything that can happen does, at once; then it is calm, and all must be well.

The production core, i.e. journal, fold, decision, planner, classification, outbox, window, pending observations, fence, memo
and the verdict on nodes, runs in virtual time. Processes are killed between any two of their steps, two recoveries race,
messages get lost, come twice, late and in another order, the store refuses, and no two clocks agree.
Stand-ins are the shells around that core: ranks, connections, the controller's loops, the health tasks and the sequence of
`flows.response` with the steps of `tasks.transition`. What changes there has to be changed here.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storm_store import Broken, remembered
from storm_world import SHORT, TABLES, World

from unicron_lib.agent.messages import GpuFault, RankResumed, RankStalled
from unicron_lib.detection.classify import classify
from unicron_lib.domain.cluster import ClusterState, IncidentStatus
from unicron_lib.domain.jobs import ENDED, JobStatus
from unicron_lib.domain.journal import fold_all

STORM_S, CALM_S, STEADY_S = 40.0, 400.0, 6.0


class StormBroken(AssertionError):
    """What is wrong, and the story of the seed."""


@dataclass(frozen=True)
class Weather:
    """What happened: how often each kind of harm was done, and what the production code had to do about it."""

    harm: Counter[str]
    events: Counter[str]
    entries: int
    left_behind: tuple[str, ...]
    adopted: int
    story: tuple[str, ...]


def play(seed: int) -> Weather:
    """Play storm number `seed` to its end. Raises StormBroken with its story."""
    with remembered():
        return _play(seed)


def _play(seed: int) -> Weather:
    world = World(seed)
    storm = _Storm(world)
    try:
        storm.rage()
        storm.calm_down()
        _check_all(world)
    except Exception as error:
        told = "\n".join(world.kernel.story)
        raise StormBroken(f"storm {seed}: {error}\n{told}\nstorm {seed}: {error}") from error
    events = Counter(type(event).__name__ for event in world.witness.events)
    return Weather(
        harm=storm.done,
        events=events,
        entries=len(world.witness.events),
        left_behind=tuple(world.witness.left_behind),
        adopted=world.witness.adopted,
        story=tuple(world.kernel.story),
    )


class _Storm:
    def __init__(self, world: World) -> None:
        self.world, self.kernel, self.rng = world, world.kernel, world.kernel.rng
        self.done: Counter[str] = Counter()

    def rage(self) -> None:
        for clock in self.world.clocks:
            clock.offset_s, clock.rate = self.rng.uniform(-5.0, 5.0), self.rng.uniform(0.98, 1.02)
        for name in TABLES:
            self.kernel.later(self.rng.uniform(0.0, 15.0), lambda name=name: self.world.submit(name))
        for _ in range(self.rng.randint(4, 14)):
            harm = self.rng.choice(sorted(HARMS))
            self.kernel.later(self.rng.uniform(4.0, STORM_S), lambda harm=harm: self._do(harm))
        self.kernel.run(STORM_S)

    def _do(self, harm: str) -> None:
        self.kernel.tell(f"harm: {harm}")
        self.done[harm] += 1
        HARMS[harm](self)

    def calm_down(self) -> None:
        """Whoever was killed is started again, what was cut off is reached again; a person repairs what is isolated."""
        self.kernel.tell("calm")
        self.world.network.is_stormy = False
        self.kernel.start("person", self.world.repair())
        end, steady_s = self.kernel.now + CALM_S, 0.0
        while steady_s < STEADY_S:
            self.kernel.run(1.0)
            steady_s = 0.0 if _unrest(self.world) else steady_s + 1.0
            if self.kernel.now > end:
                raise Broken(f"{CALM_S} s after the storm {_unrest(self.world)}")

    # --- harm

    def _for(self, low_s: float, high_s: float, undo: Callable[[], None]) -> None:
        self.kernel.later(self.rng.uniform(low_s, high_s), undo)

    def _rank(self) -> tuple[object, int, object] | None:
        found = list(self.world.ranks())
        return self.rng.choice(found) if found else None

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

    def broken_gpu(self) -> None:
        """Nobody tells: ranks die there, however often they are started."""
        node = self.rng.choice(list(self.world.nodes.values()))
        node.broken.add(self.rng.randrange(node.num_gpus))

    def gpu_fault(self) -> None:
        """The agent tells, perhaps twice."""
        node = self.rng.choice(list(self.world.nodes.values()))
        gpu = self.rng.randrange(node.num_gpus)
        node.broken.add(gpu)
        kind = self.rng.choice(("gpu_lost", "ecc_error", "nvlink_error"))
        jobs = tuple(sorted({rank.job for rank in node.ranks}))
        for _ in range(self.rng.randint(1, 2)):
            node.observe(GpuFault(kind=kind, gpu=gpu, uuid="", evidence="told by the driver", jobs=jobs))

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

    def node_death(self) -> None:
        node = self.rng.choice([node for node in self.world.nodes.values() if node.is_up] or [None])
        if node is None:
            return
        node.is_up = False
        node.gpus.clear()
        node.link = 0

        def boot() -> None:
            node.begin_life()
            node.is_up = True

        self._for(0.5, 20.0, boot)

    def partition(self) -> None:
        node = self.rng.choice(list(self.world.nodes.values()))
        node.is_cut_off = True
        if self.rng.random() < 0.5:
            node.hang_up(node.link)

        def mend() -> None:
            node.is_cut_off = False
            node.hang_up(node.link)

        self._for(0.5, 15.0, mend)

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


HARMS: Mapping[str, Callable[[_Storm], None]] = {
    name: getattr(_Storm, name)
    for name in (
        *("crash", "exception", "broken_gpu", "gpu_fault", "stall", "node_death", "partition", "controller_crash"),
        *("recovery_crash", "health_crash", "store_away", "store_mumbles", "clock_step"),
    )
}


def _unrest(world: World) -> str:
    """What is not well yet; empty if all is."""
    state = world.witness.state
    if state.open_incidents:
        return f"{state.open_incidents[0].id} ({state.open_incidents[0].kind}) is open"
    if state.active_plan:
        return f"{state.active_plan.plan.id} is under way"
    forgotten = [it.id for it in state.incidents.values() if it.status is IncidentStatus.PLANNED]
    if forgotten:
        return f"{forgotten[0]} is planned for, but nothing is under way"
    if any(len(node.outbox) for node in world.nodes.values()):
        return "an observation has not been acknowledged"
    missing = set(TABLES) - set(state.jobs)
    idle = [job.spec.job for job in state.jobs.values() if job.status not in ENDED and not _trains(world, state, job.spec.job)]
    return f"{', '.join(sorted(missing) + idle)} does not train" if missing or idle else ""


def _trains(world: World, state: ClusterState, name: str) -> bool:
    _, at = world.steps.get((name, state.jobs[name].generation), (0, -1e9))
    return world.kernel.now - at < 2.0


def _check_all(world: World) -> None:
    """What only the whole story can show."""
    state = world.witness.state
    world.store.away = world.store.mumbling = False
    untold = [
        seen for node in world.nodes.values() for seen in node.said if classify(seen) and seen.id not in world.witness.ids
    ]
    if untold:
        raise Broken(f"nobody has journalled {untold[0]}")
    if fold_all(world.witness.events) != state or Counter(e.seq for e in world.person.entries()) != Counter(
        range(state.seq + 1)
    ):
        raise Broken("the journal does not fold to the state that was seen")
    for job in state.jobs.values():
        if job.status in ENDED and not (job.spec.job == SHORT and job.status is JobStatus.FINISHED):
            raise Broken(f"{job.spec.job} is {job.status}: {job.reason}")
    holders: Counter[str] = Counter()
    for incident in state.incidents.values():
        if incident.status is not IncidentStatus.MERGED:
            holders.update({failure.id for failure in incident.failures})
        done = [it for it in state.plans.values() if it.finished_at is not None and incident.id in it.plan.incidents]
        if len(done) > 1 or (incident.status is IncidentStatus.CLOSED and incident.plan and len(done) != 1):
            raise Broken(f"{incident.id} was answered to its end by {len(done)} plans")
    twice = [name for name, count in holders.items() if count > 1]
    if twice:
        raise Broken(f"failure {twice[0]} is part of several incidents")
