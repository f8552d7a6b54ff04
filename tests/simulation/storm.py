"""A storm: for a while everything that can happen does, at once; then it is calm, and all must be well.

The production core, i.e. journal, fold, decision, planner, classification, outbox, window, pending observations, fence, memo
and the verdict on nodes, runs in virtual time. Processes are killed between any two of their steps, two recoveries race,
messages get lost, come twice, late and in another order, the store refuses, and no two clocks agree. Jobs are cancelled in
the middle of it, read batches that spoil them, and use up their restarts; nodes come and go, and are of several pools.
Stand-ins are the shells around that core: ranks, connections, the controller's loops, the health tasks and the sequence of
`flows.response` with the steps of `tasks.transition`. What changes there has to be changed here.
"""

from collections import Counter
from dataclasses import dataclass

from storm_harms import HARMS, Harms
from storm_store import remembered
from storm_training import SHORT, SHORT_ITERS
from storm_witness import Broken
from storm_world import TABLES, World

from unicron_lib.detection.classify import classify
from unicron_lib.domain.cluster import ClusterState, IncidentStatus, NodeStatus
from unicron_lib.domain.jobs import ENDED, JobState, JobStatus
from unicron_lib.domain.journal import fold_all

STORM_S, CALM_S, STEADY_S = 32.0, 400.0, 4.0


class StormBroken(AssertionError):
    """What is wrong, and the story of the seed."""


@dataclass(frozen=True)
class Weather:
    """What happened: how often each kind of harm was done, and what the production code had to do about it."""

    seed: int
    harm: Counter[str]
    seen: Counter[str]
    left_behind: tuple[str, ...]
    story: tuple[str, ...]


def play(seed: int) -> Weather:
    """Play storm number `seed` to its end. Raises StormBroken with its story."""
    with remembered():
        return _play(seed)


def _play(seed: int) -> Weather:
    world = World(seed)
    harms = Harms(world)
    try:
        _rage(world, harms)
        _calm_down(world)
        _check_all(world)
    except Exception as error:
        told = "\n".join(world.kernel.story)
        raise StormBroken(f"storm {seed}: {error}\n{told}\nstorm {seed}: {error}") from error
    witness = world.witness
    return Weather(
        seed=seed,
        harm=harms.done,
        seen=witness.seen,
        left_behind=tuple(witness.left_behind),
        story=tuple(world.kernel.story),
    )


def _rage(world: World, harms: Harms) -> None:
    kernel, rng = world.kernel, world.kernel.rng
    for clock in world.clocks:
        clock.offset_s, clock.rate = rng.uniform(-5.0, 5.0), rng.uniform(0.98, 1.02)
    for name in TABLES:
        kernel.later(rng.uniform(0.0, 10.0), lambda name=name: world.submit(name))
    for _ in range(rng.randint(5, 16)):
        harm = rng.choice(sorted(HARMS))
        kernel.later(rng.uniform(4.0, STORM_S), lambda harm=harm: harms.do(harm))
    kernel.run(STORM_S)


def _calm_down(world: World) -> None:
    """Whoever was killed is started again, what was cut off is reached again; a person repairs what is isolated."""
    kernel = world.kernel
    kernel.tell("calm")
    world.network.is_stormy = False
    kernel.start("person", world.repair())
    end, steady_s = kernel.now + CALM_S, 0.0
    while steady_s < STEADY_S:
        kernel.run(1.0)
        unrest = _unrest(world)
        steady_s = 0.0 if unrest else steady_s + 1.0
        if kernel.now > end:
            raise Broken(f"{CALM_S} s after the storm {unrest}")


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
    out = [node.id for node in state.nodes.values() if node.status is not NodeStatus.READY]
    if out:
        return f"{', '.join(out)} is not ready"
    if any(len(node.outbox) for node in world.nodes.values()):
        return "an observation has not been acknowledged"
    return _idle(world, state)


def _idle(world: World, state: ClusterState) -> str:
    living = [(name, job.generation) for name, job in state.jobs.items() if job.status not in ENDED]
    idle = [name for name, generation in living if not world.training.trains(name, generation)]
    idle += [name for name in TABLES if name not in state.jobs or state.jobs[name].status is JobStatus.CANCELLED]
    spoiled = [name for name, generation in living if world.training.harm_within(name, generation) is not None]
    if idle:
        return f"{', '.join(idle)} does not train"
    return f"{', '.join(spoiled)} goes on from what a wrong batch did" if spoiled else ""


def _check_all(world: World) -> None:
    """What only the whole story can show."""
    state = world.witness.state
    world.store.away = world.store.mumbling = False
    _check_journal(world, state)
    for job in state.jobs.values():
        if job.status in ENDED and not _may_end(world, job):
            raise Broken(f"{job.spec.job} is {job.status}: {job.reason}")
    _check_incidents(state)
    for node, gpu, rank in world.training.ranks():
        job = state.jobs[rank.job]
        if job.status in ENDED or rank.generation != job.generation:
            raise Broken(f"{rank} still lives on {node.name}, GPU {gpu}; {rank.job} is {job.status}, {job.generation}")


def _check_journal(world: World, state: ClusterState) -> None:
    untold = [
        seen for node in world.nodes.values() for seen in node.said if classify(seen) and seen.id not in world.witness.ids
    ]
    if untold:
        raise Broken(f"nobody has journalled {untold[0]}")
    if sorted(entry.seq for entry in world.person.entries()) != list(range(state.seq + 1)):
        raise Broken("the journal has gaps")
    if world.seed % 10 == 0 and fold_all(world.witness.events) != state:
        raise Broken("the journal does not fold to the state that was seen")


def _may_end(world: World, job: JobState) -> bool:
    """The short job finishes, or uses up its budget; whose loss went wrong twice at one place is given up."""
    name, training = job.spec.job, world.training
    if job.status is JobStatus.FINISHED:
        own = [len(it) for (of, generation), it in training.learned.items() if of == name and generation >= job.begins_with]
        return name == SHORT and max(own, default=0) == SHORT_ITERS
    bad = len(training.deadly.get(name, ())) + len(training.wrong.get(name, ()))
    return ("max_restarts" in job.reason and name == SHORT and world.has_budget) or ("second time" in job.reason and bad > 1)


def _check_incidents(state: ClusterState) -> None:
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
