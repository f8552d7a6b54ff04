"""Faults at the same place of a training, whoever runs it: so long after so many iterations since a checkpoint."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unicron_lib.errors import UnicronError
from unicron_lib.local.iterations import IterationWatch, Sight
from unicron_lib.local.outages import split

PATIENCE_S = 240.0


class BenchStopped(UnicronError):
    """What the bench waits for did not happen."""


class NotInstalled(UnicronError):
    """A system that is no dependency of ours is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a training a fault is done: `past` iterations after a checkpoint, then after `wait_s` of the next one."""

    interval: int
    past: int
    wait_s: float


async def reach(watch: IterationWatch, place: Place, *, ranks: int) -> None:
    """Wait until `ranks` ranks have come to the next such place. Raises BenchStopped."""
    seen = len(watch.sights)

    def is_there(sights: Sequence[Sight]) -> bool:
        return any(it.iteration % place.interval == place.past for it in _complete(sights[seen:], ranks))

    await until(watch, is_there, f"iteration {place.past} after a checkpoint, by {ranks} ranks")
    await asyncio.sleep(place.wait_s)


async def regained(watch: IterationWatch, fault_at: float, *, ranks: int, renews: bool = True, iterations: int = 2) -> None:
    """Wait until `ranks` ranks have done so many iterations that had not been done before the fault. Raises BenchStopped."""

    def is_there(sights: Sequence[Sight]) -> bool:
        old, new = split(sights, fault_at, renews=renews)
        reached = max((it.iteration for it in old), default=-1)
        return len({it.iteration for it in _complete(new, ranks) if it.iteration > reached}) >= iterations

    await until(watch, is_there, f"{iterations} new iterations by {ranks} ranks")


async def stepping(watch: IterationWatch, *, ranks: int, iterations: int = 3) -> None:
    """Wait until `ranks` ranks have done so many iterations from now on. Raises BenchStopped."""
    seen = len(watch.sights)
    await until(
        watch, lambda sights: len(_complete(sights[seen:], ranks)) >= iterations, f"{iterations} iterations by {ranks} ranks"
    )


async def until(watch: IterationWatch, holds: Callable[[Sequence[Sight]], bool], what: str) -> None:
    """Wait for something that is to be seen. Raises BenchStopped."""
    if not await asyncio.to_thread(watch.until, holds, timeout_s=PATIENCE_S):
        raise BenchStopped(f"waited {PATIENCE_S:.0f} s in vain for {what}")


def _complete(sights: Sequence[Sight], ranks: int) -> list[Sight]:
    """One sight of each iteration that at least so many ranks have done together: the one that made them so many."""
    found: dict[tuple[int, int], set[int]] = {}
    whole = []
    for sight in sights:
        done = found.setdefault((sight.generation, sight.iteration), set())
        if sight.rank not in done:
            done.add(sight.rank)
            if len(done) == ranks:
                whole.append(sight)
    return whole
