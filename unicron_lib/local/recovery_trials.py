"""The faults of `unicron bench recovery` on a local cluster of ours, and the training that all systems do."""

import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import StepKind
from unicron_lib.domain.timeline import timing
from unicron_lib.local import recovering, strikes
from unicron_lib.local.cluster import LocalCluster, running
from unicron_lib.local.outages import Fault, Outage, felt_at, outage, stall
from unicron_lib.local.recovering import Patients, Struck
from unicron_lib.local.site import PREFECT_FILE, create_site
from unicron_lib.local.strikes import Place

RANKS, NODES = 4, 2
SPARE_NODES = 1
"""For the second job."""
VICTIMS = (1, 2, 3, 0)
PAST = (4, 7, 2, 5)
"""Iterations since the checkpoint, in turn: 4.5 on average, as chance would have it."""
PACE_S = 0.2
WHEN = 0.6
"""Of an iteration: ranks have computed their micro-batches, and wait for the pace."""
SEV3_TEXT = "ConnectionResetError: injected: connection reset by peer"

JOB = JobSpec(
    job="bench",
    weight=2.0,
    min_gpus=2,
    max_gpus=RANKS,
    max_restarts=1000,
    restart_window_s=0.0,
    throughput_flops={2: 5.0e8, 3: 8.0e8, 4: 1.0e9},
    transition_s=0.1,
    global_batch_size=16,
    train_iters=1_000_000,
    save_interval=10,
    params_dtype="float64",
    pace_s=PACE_S,
)
NEIGHBOUR = replace(
    JOB, job="neighbour", weight=1.0, min_gpus=1, max_gpus=2, throughput_flops={1: 7.0e8, 2: 1.0e9}, global_batch_size=8, seed=1
)
"""With six GPUs the best plan is 4 + 2, with four it is 3 + 1: both jobs are moved when a node of the first is lost."""
Found = tuple[Fault, Outage]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What to do, and in which directory."""

    faults: Sequence[Fault]
    repeat: int
    home: Path
    say: Say

    def place(self, number: int) -> Place:
        """Where the fault of that number is done."""
        return Place(interval=JOB.save_interval, past=PAST[number % len(PAST)], wait_s=WHEN * PACE_S)


def lost_micro_batches(again: int, *, ranks_lost: int, discarded: int | None = None) -> int:
    """Micro-batches that survivors had complete and computed once more: of whole iterations, and of the one under way.

    Of that they `discarded` so many; None where not all of them live on, or tell: then all, for it was complete at the fault.
    """
    share = JOB.num_micro_batches * (RANKS - ranks_lost) // RANKS
    return again * share + (share if discarded is None else discarded)


def lost_as_told(state: ClusterState, incident: Incident, again: int, *, ranks_lost: int) -> int:
    """`lost_micro_batches`, with what the steps of the incident's plan tell of the iteration under way."""
    told = partial(recovering.told_of_plan, state, incident, JOB.job)
    live_on = (told(StepKind.DRAIN, "held") or 0) >= RANKS - ranks_lost
    discarded = told(StepKind.RESUME, "discarded_micro_batches") if live_on else None
    return lost_micro_batches(again, ranks_lost=ranks_lost, discarded=discarded)


async def ours(trials: Trials) -> AsyncGenerator[Found, None]:
    """All faults on a local cluster. Raises UnicronError."""
    site = create_site(trials.home / "unicron", num_nodes=NODES + SPARE_NODES, gpus_per_node=RANKS // NODES, with_s3=True)
    os.environ.update(site.environment())
    async with running(site, trials.say, PREFECT_FILE) as cluster:
        with Patients(cluster) as patients:
            await patients.submit(JOB, gpus=RANKS)
            for fault in (Fault.SEV3, Fault.SEV2):
                for number in range(trials.repeat if fault in trials.faults else 0):
                    yield fault, await _hurt_a_rank(patients, trials, fault, number)
            if Fault.SEV1 in trials.faults:
                await patients.submit(NEIGHBOUR, gpus=2)
                for number in range(trials.repeat):
                    node, lost = await _lose_a_node(patients, trials, number)
                    yield Fault.SEV1, lost
                    yield Fault.GROWTH, await _grow(patients, cluster, node)


async def _hurt_a_rank(patients: Patients, trials: Trials, fault: Fault, number: int) -> Outage:
    watch, rank = patients.watches[JOB.job], VICTIMS[number % RANKS]
    await strikes.reach(watch, trials.place(number), ranks=RANKS)
    if fault is Fault.SEV2:
        struck = await patients.kill_rank(JOB.job, rank)
    else:
        struck = await patients.raise_in(JOB.job, rank, SEV3_TEXT)
    await strikes.regained(watch, struck.at, ranks=RANKS)
    at = felt_at(watch.sights, struck.at) if fault is Fault.SEV3 else struck.at
    found = await _told(patients, struck, outage(watch.sights, at, ranks=RANKS), ranks_lost=1)
    await patients.calm({JOB.job: RANKS})
    return found


async def _lose_a_node(patients: Patients, trials: Trials, number: int) -> tuple[str, Outage]:
    assignment = (await patients.calm({JOB.job: RANKS, NEIGHBOUR.job: 2})).jobs[JOB.job].assignment
    assert assignment is not None
    node, lost = assignment.nodes[-1], sum(slot.node == assignment.nodes[-1] for slot in assignment.slots)
    await strikes.reach(patients.watches[JOB.job], trials.place(number), ranks=RANKS)
    struck = await patients.kill_node(node)
    each = []
    for job, ranks in ((JOB.job, 3), (NEIGHBOUR.job, 1)):
        await strikes.regained(patients.watches[job], struck.at, ranks=ranks)
        each.append(outage(patients.watches[job].sights, struck.at, ranks=ranks))
    worst = Outage(
        stalled_s=max(it.stalled_s for it in each),
        regained_s=max(it.regained_s for it in each),
        again=sum(it.again for it in each),
    )
    return node, await _told(patients, struck, worst, ranks_lost=lost)


async def _told(patients: Patients, struck: Struck, found: Outage, *, ranks_lost: int) -> Outage:
    """With what the journal tells of it."""
    state, incident = await patients.healed(struck)
    lost = lost_as_told(state, incident, found.again, ranks_lost=ranks_lost)
    return replace(found, lost_micro_batches=lost, detection_s=timing(state, incident).detection_s)


async def _grow(patients: Patients, cluster: LocalCluster, node: str) -> Outage:
    """The node comes back, and both jobs are planned anew."""
    for watch in patients.watches.values():
        await strikes.stepping(watch, ranks=1, iterations=5)
    began = time.monotonic()
    cluster.start_node(node)
    await patients.calm({JOB.job: RANKS, NEIGHBOUR.job: 2})
    for job, ranks in ((JOB.job, RANKS), (NEIGHBOUR.job, 2)):
        await strikes.stepping(patients.watches[job], ranks=ranks)
    ended = time.monotonic()
    longest = max(stall(watch.sights, began, ended) for watch in patients.watches.values())
    copied_s = max([await recovering.copy_s(cluster, job) for job in patients.watches])
    return Outage(stalled_s=longest, regained_s=longest, copy_s=copied_s)
