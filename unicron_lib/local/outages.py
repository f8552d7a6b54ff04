"""What a failure costs a job, read off what its ranks have done. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from unicron_lib.local.iterations import Sight


class Fault(StrEnum):
    """What is done: an exception that is answered in place, SIGKILL of a rank, of a node; a node that comes back."""

    SEV3 = "sev3"
    SEV2 = "sev2"
    SEV1 = "sev1"
    GROWTH = "growth"


FAULTS: Mapping[Fault, str] = MappingProxyType(
    {
        Fault.SEV3: "exception (SEV3)",
        Fault.SEV2: "rank killed (SEV2)",
        Fault.SEV1: "node killed (SEV1)",
        Fault.GROWTH: "node joins",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One fault. Seconds count from it.

    `stalled_s` to the first complete iteration of all ranks that go on, new or done before; `regained_s` to the first that
    had not been complete before; `detection_s` to the observation (None: not known). `again` are iterations that were
    complete and computed once more, `lost_micro_batches` the complete ones of survivors that were. Of a planned
    change, `stalled_s` is by how much its longest iteration was longer than usual, and `copy_s` the copy in it.
    """

    stalled_s: float
    regained_s: float
    again: int = 0
    lost_micro_batches: int | None = None
    detection_s: float | None = None
    copy_s: float = 0.0

    @property
    def after_detection_s(self) -> float | None:
        """`stalled_s`, but counted from the moment at which the fault was seen."""
        return None if self.detection_s is None else self.stalled_s - self.detection_s


def completed(sights: Iterable[Sight], *, ranks: int = 1) -> Mapping[tuple[int, int], float]:
    """When each iteration of each generation was complete: when the last of its ranks, at least so many, had done it."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for sight in sights:
        found.setdefault((sight.generation, sight.iteration), {})[sight.rank] = sight.at
    return {key: max(done.values()) for key, done in found.items() if len(done) >= ranks}


def split(sights: Sequence[Sight], fault_at: float, *, renews: bool = True) -> tuple[list[Sight], list[Sight]]:
    """What belongs to the time before the fault, and what to that after it.

    Where a recovery begins a new generation, iterations of the old one that come after the fault have not felt it yet.
    """
    at_fault = max((it.generation for it in sights if it.at <= fault_at), default=-1)

    def is_after(sight: Sight) -> bool:
        return sight.generation > at_fault if renews else sight.at > fault_at

    return [it for it in sights if not is_after(it)], [it for it in sights if is_after(it)]


def outage(sights: Sequence[Sight], fault_at: float, *, ranks: int = 1, renews: bool = True) -> Outage:
    """What a fault at `fault_at` cost, with `ranks` ranks going on; raises ValueError if no new iteration came after it."""
    old, new = split(sights, fault_at, renews=renews)
    reached = max((sight.iteration for sight in old), default=-1)
    after = completed(new, ranks=ranks)
    beyond = [at for (_, iteration), at in after.items() if iteration > reached]
    if not beyond:
        raise ValueError(f"no iteration after {reached}, the last one before the fault, was complete")
    again = {iteration for _, iteration in after if iteration <= reached}
    return Outage(stalled_s=min(after.values()) - fault_at, regained_s=min(beyond) - fault_at, again=len(again))


def felt_at(sights: Sequence[Sight], fault_at: float) -> float:
    """When a fault that was ordered at `fault_at` can have had its effect: not before the generation's last iteration."""
    old, _ = split(sights, fault_at)
    return max([fault_at, *(sight.at for sight in old)])


def stall(sights: Sequence[Sight], began: float, ended: float) -> float:
    """By how many seconds the longest pause between complete iterations from `began` to `ended` exceeds the usual one."""
    times = sorted(completed(sights).values())
    gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
    usual = [gap for gap, at in gaps if at <= began]
    within = [gap for gap, at in gaps if began < at <= ended]
    if not usual or not within:
        raise ValueError("too few iterations to tell a stall")
    return max(within) - statistics.median(usual)
