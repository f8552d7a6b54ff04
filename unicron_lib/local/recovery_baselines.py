"""The faults of `unicron bench recovery` under what it is measured against, at the same places of the same training."""

import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from unicron_lib.local import strikes
from unicron_lib.local.iterations import IterationWatch
from unicron_lib.local.outages import Fault, Outage, felt_at, outage
from unicron_lib.local.recovery_trials import JOB, NODES, RANKS, VICTIMS, Found, Trials, lost_micro_batches
from unicron_lib.local.strikes import NotInstalled
from unicron_lib.local.torchft import Torchft, is_installed
from unicron_lib.local.torchrun import Torchrun


async def torchrun(trials: Trials) -> AsyncGenerator[Found, None]:
    """All faults under torchrun: those of ranks on one node, which is quickest, that of a node on two. Raises BenchStopped."""
    of_ranks = [fault for fault in (Fault.SEV3, Fault.SEV2) if fault in trials.faults]
    if of_ranks:
        async for found in _under_torchrun(trials, of_ranks, nodes=1):
            yield found
    if Fault.SEV1 in trials.faults:
        async for found in _under_torchrun(trials, [Fault.SEV1], nodes=NODES):
            yield found


async def _under_torchrun(trials: Trials, faults: Sequence[Fault], *, nodes: int) -> AsyncGenerator[Found, None]:
    run = Torchrun(JOB, trials.home / f"torchrun-{nodes}", ranks=RANKS, nodes=nodes)
    with IterationWatch(run.ledgers) as watch:
        try:
            for _ in range(nodes):
                run.start_node()
            await strikes.stepping(watch, ranks=RANKS, iterations=JOB.save_interval + 1)
            for fault in faults:
                for number in range(trials.repeat):
                    yield fault, await _hurt_torchrun(run, watch, trials, fault, number)
        finally:
            await run.stop()


async def _hurt_torchrun(run: Torchrun, watch: IterationWatch, trials: Trials, fault: Fault, number: int) -> Outage:
    ranks_lost = RANKS // NODES if fault is Fault.SEV1 else 1
    victim = run.process(VICTIMS[number % RANKS])
    harm: dict[Fault, Callable[[], None]] = {
        Fault.SEV3: lambda: victim.send_signal(signal.SIGUSR1),
        Fault.SEV2: victim.kill,
        Fault.SEV1: run.kill_node,
    }
    await strikes.reach(watch, trials.place(number), ranks=RANKS)
    fault_at = time.monotonic()
    harm[fault]()
    left = RANKS - ranks_lost if fault is Fault.SEV1 else RANKS
    await strikes.regained(watch, fault_at, ranks=left)
    at = felt_at(watch.sights, fault_at) if fault is Fault.SEV3 else fault_at
    found = outage(watch.sights, at, ranks=left)
    if fault is Fault.SEV1:
        run.start_node()
        await strikes.stepping(watch, ranks=RANKS)
    return replace(found, lost_micro_batches=lost_micro_batches(found.again, ranks_lost=ranks_lost))


async def torchft(trials: Trials) -> AsyncGenerator[Found, None]:
    """All faults under torchft, if it is installed: each rank is a replica group. Raises NotInstalled, BenchStopped."""
    if not is_installed():
        raise NotInstalled("torchft is not installed: pip install torchft")
    run = Torchft(JOB, trials.home / "torchft", ranks=RANKS)
    with IterationWatch(run.ledgers) as watch:
        try:
            run.start()
            await strikes.stepping(watch, ranks=RANKS, iterations=JOB.save_interval + 1)
            for fault in trials.faults:
                for number in range(trials.repeat):
                    yield fault, await _hurt_torchft(run, watch, trials, fault, number)
        finally:
            await run.stop()


async def _hurt_torchft(run: Torchft, watch: IterationWatch, trials: Trials, fault: Fault, number: int) -> Outage:
    """Survivors go on without the lost rank, so that the iteration under way is all that they do again."""
    victim = VICTIMS[number % RANKS]
    ranks_lost = RANKS // NODES if fault is Fault.SEV1 else 1
    harm: dict[Fault, Callable[[], None]] = {
        Fault.SEV3: lambda: run.process(victim).send_signal(signal.SIGUSR1),
        Fault.SEV2: lambda: run.process(victim).kill(),
        Fault.SEV1: lambda: run.lose(range(RANKS - ranks_lost, RANKS)),
    }
    await strikes.reach(watch, trials.place(number), ranks=RANKS)
    fault_at = time.monotonic()
    harm[fault]()
    await strikes.regained(watch, fault_at, ranks=RANKS - ranks_lost, renews=False)
    found = outage(watch.sights, fault_at, ranks=RANKS - ranks_lost, renews=False)
    run.bring_back()
    await strikes.stepping(watch, ranks=RANKS)
    return replace(found, lost_micro_batches=lost_micro_batches(found.again, ranks_lost=ranks_lost))
