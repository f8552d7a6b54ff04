"""What failures cost a job, by system and kind of fault, held against bars. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lib.local.outages import Fault, Outage

CRASH_BAR_S = 1.0
NODE_LOSS_BAR_S = 3.0
GROWTH_BAR_S = 1.0
RATIO_BAR = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """All outages of one kind in one system."""

    system: str
    fault: Fault
    outages: tuple[Outage, ...]

    @property
    def stalled_s(self) -> float:
        """The median."""
        return statistics.median(outage.stalled_s for outage in self.outages)

    @property
    def again(self) -> float:
        """The median."""
        return statistics.median(outage.again for outage in self.outages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that was promised, and whether it was held; `found` is None if it could not be measured."""

    what: str
    bar: float
    found: float | None
    at_least: bool = False
    unit: str = "s"

    @property
    def ok(self) -> bool:
        """What was not measured is not held."""
        if self.found is None:
            return False
        return self.found >= self.bar if self.at_least else self.found <= self.bar


def recoveries(measured: Sequence[tuple[str, Fault, Outage]]) -> list[Recovery]:
    """The outages of each system and fault, in the order of the first of each."""
    found: dict[tuple[str, Fault], list[Outage]] = {}
    for system, fault, outage in measured:
        found.setdefault((system, fault), []).append(outage)
    return [Recovery(system=system, fault=fault, outages=tuple(outages)) for (system, fault), outages in found.items()]


def bars(measured: Sequence[Recovery], *, ours: str, other: str) -> list[Bar]:
    """What was promised of `ours`, as far as its faults were measured; speed is held against `other`."""
    found = {(it.system, it.fault): it for it in measured}
    crash, node, growth = (found.get((ours, fault)) for fault in (Fault.SEV2, Fault.SEV1, Fault.GROWTH))
    told = []
    if crash:
        told += _crash_bars(crash, found.get((other, Fault.SEV2)), other)
    if node:
        after = [it.after_detection_s for it in node.outages if it.after_detection_s is not None]
        seen_s = statistics.median(after) if after else None
        told.append(Bar(what="node loss with two jobs, from its detection", bar=NODE_LOSS_BAR_S, found=seen_s))
        told.append(Bar(what="node loss with two jobs, from the fault", bar=NODE_LOSS_BAR_S, found=node.stalled_s))
    if growth:
        beyond_s = statistics.median(max(0.0, it.stalled_s - it.copy_s) for it in growth.outages)
        told.append(Bar(what="growth by a node: stall beyond the copy", bar=GROWTH_BAR_S, found=beyond_s))
    return told


def _crash_bars(crash: Recovery, other: Recovery | None, name: str) -> list[Bar]:
    counts = [it.lost_micro_batches for it in crash.outages if it.lost_micro_batches is not None]
    lost = max(counts) if len(counts) == len(crash.outages) else None
    return [
        Bar(what="crash to the first complete iteration, median", bar=CRASH_BAR_S, found=crash.stalled_s),
        Bar(what="complete micro-batches of survivors computed again, most", bar=0, found=lost, unit=""),
        *(
            [Bar(what=f"faster than {name}", bar=RATIO_BAR, found=other.stalled_s / crash.stalled_s, at_least=True, unit="x")]
            if other
            else []
        ),
    ]
