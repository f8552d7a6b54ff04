"""The loss of a node: wait for the repair, shrink the jobs that were on it, take GPUs from others, or replace it.

All ways are priced until the next failure is expected. Each has two phases: what jobs hold until the node is back, and
what they go over to then, if that pays. The phases are allocations as always, of fewer jobs where an alternative leaves
the others alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Alternative, AlternativeKind
from unicron_lib.errors import UserError
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate
from unicron_lib.planning.pools import no_solver
from unicron_lib.planning.waf import Demand, cost, gain, running_s

ENDLESS_GPU_S = 1e18
"""Of a phase that ends at a known time, nothing but that time counts."""

Share = Callable[[Request], Allocation]
Gpus = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of nodes: seconds until a lost one is repaired or replaced, and prices in dollars an hour.

    `dollars_per_eflop` is what 1e18 weighted FLOP are worth; left out, dollars count only among ways with as many FLOP. A
    node is not paid for while it is in repair. Raises UserError for a figure that is negative or not finite.
    """

    repair_s: float
    replace_s: float
    node_dollars_per_h: float = 0.0
    replacement_dollars_per_h: float | None = None
    dollars_per_eflop: float | None = None

    def __post_init__(self) -> None:
        for key in self.__slots__:
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{key} is {value}, it must be a finite number and not negative")

    @property
    def new_dollars_per_h(self) -> float:
        """The price of the replacement."""
        return self.node_dollars_per_h if self.replacement_dollars_per_h is None else self.replacement_dollars_per_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The cluster after the loss: jobs that were hit are faulted, `num_gpus` GPUs on `num_nodes` nodes are left."""

    demands: tuple[Demand, ...]
    num_gpus: int
    lost_gpus: int
    num_nodes: int
    lost_nodes: int
    mtbf_gpu_s: float

    @property
    def horizon_s(self) -> float:
        """Seconds until the next failure is expected."""
        return running_s(self.mtbf_gpu_s, self.num_gpus or self.lost_gpus)


def compare(loss: Loss, outlook: Outlook, *, share: Share) -> tuple[Alternative, ...]:
    """The alternatives that are possible, in the order of `AlternativeKind`; one of them is best.

    `share` solves an allocation. Taking GPUs may also mean taking none: it is never worse than shrinking.
    """
    ways = _ways(loss, outlook.repair_s, share)
    # until it has started, the best of the other ways goes on
    bridges = _ways(loss, outlook.replace_s, share)
    best = max(bridges.values(), key=lambda way: way.flop)
    priced = [_priced(loss, outlook, kind, way) for kind, way in ways.items()]
    priced.append(_priced(loss, outlook, AlternativeKind.REPLACE, best))
    first = max(priced, key=_merit)
    return tuple(replace(it, best=it is first, reason=_reason(loss, outlook, it, first, priced)) for it in priced)


def of_nodes(
    request: Request, left: Sequence[Node], lost: Sequence[Node], outlook: Outlook, *, timer: Callable[[], float]
) -> tuple[Alternative, ...]:
    """The alternatives of a plan that shares the GPUs of the nodes `left`, by the dynamic programme."""
    loss = Loss(
        demands=request.demands,
        num_gpus=sum(node.num_gpus for node in left),
        lost_gpus=sum(node.num_gpus for node in lost),
        num_nodes=len(left),
        lost_nodes=len(lost),
        mtbf_gpu_s=request.mtbf_gpu_s,
    )

    def share(wanted: Request) -> Allocation:
        return allocate(wanted, timer=timer, solve=no_solver)

    return compare(loss, outlook, share=share)


def advice(ways: Sequence[Alternative], gpus: Gpus) -> str:
    """A sentence for whoever reads the plan that gives `gpus`, if something else would be better; else ""."""
    best = next((it for it in ways if it.best), None)
    does_it = best is None or (best.kind in {AlternativeKind.SHRINK, AlternativeKind.TAKE} and best.gpus == gpus)
    return "" if best is None or does_it else f" Better still, if it can be done: {best.kind}, {best.reason}."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Two phases of one alternative."""

    gpus: Gpus
    flop: float


def _ways(loss: Loss, back_s: float, share: Share) -> dict[AlternativeKind, _Way]:
    """What is possible if the node is back after `back_s` seconds."""
    others, hit = [d for d in loss.demands if not d.faulted], [d for d in loss.demands if d.faulted]
    pinned = tuple(_pinned(demand) for demand in others)
    still = tuple(replace(demand, throughput_flops={}, must_run=False) for demand in hit)
    smaller = tuple(_at_most_now(demand) for demand in hit)
    again = tuple(_pinned(demand) for demand in hit)
    found: dict[AlternativeKind, _Way] = {}
    waits = _first_phases(loss, (*pinned, *still), back_s, share)
    shrinks = _first_phases(loss, (*pinned, *smaller), back_s, share)
    free = tuple(replace(demand, must_run=False) for demand in loss.demands)
    takes = _first_phases(loss, loss.demands, back_s, share) or _first_phases(loss, free, back_s, share)
    if waits and hit:
        found[AlternativeKind.WAIT] = _best(loss, waits, (*pinned, *again), back_s, share)
    if shrinks:
        options = tuple(replace(demand, must_run=False) for demand in smaller)
        found[AlternativeKind.SHRINK] = _best(loss, shrinks, (*pinned, *options), back_s, share)
    found[AlternativeKind.TAKE] = _best(loss, [*shrinks, *takes], free, back_s, share)
    return found


def _first_phases(loss: Loss, demands: Sequence[Demand], back_s: float, share: Share) -> list[Gpus]:
    """The best allocations of what is left, for the time until the node is back and as if it never came back."""
    found: list[Gpus] = []
    for seconds in dict.fromkeys((min(back_s, loss.horizon_s), loss.horizon_s)):
        try:
            gpus = share(_lasting(demands, loss.num_gpus, seconds)).gpus
        except NotEnoughGpus:
            return []
        found += [gpus] if gpus not in found else []
    return found


def _best(loss: Loss, firsts: Sequence[Gpus], later: Sequence[Demand], back_s: float, share: Share) -> _Way:
    """The first phase with which both together gain most, when `later` says what jobs may get once the node is back."""
    distinct = [gpus for index, gpus in enumerate(firsts) if gpus not in firsts[:index]]
    ways = [_Way(gpus=gpus, flop=_first(loss, gpus, back_s) + _second(loss, gpus, later, back_s, share)) for gpus in distinct]
    return max(ways, key=lambda way: way.flop)


def _first(loss: Loss, gpus: Gpus, back_s: float) -> float:
    seconds = min(back_s, loss.horizon_s)
    table = {demand.job: demand for demand in map(_with_present_size, loss.demands)}
    return math.fsum(gain(table[job], size, expected_s=seconds) for job, size in gpus.items())


def _second(loss: Loss, gpus: Gpus, later: Sequence[Demand], back_s: float, share: Share) -> float:
    seconds = loss.horizon_s - back_s
    if seconds <= 0:
        return 0.0
    known = {demand.job: _with_present_size(demand) for demand in loss.demands}
    demands = tuple(_after(demand, known[demand.job], gpus[demand.job]) for demand in later)
    return share(_lasting(demands, loss.num_gpus + loss.lost_gpus, seconds)).gain


def _after(demand: Demand, known: Demand, size: int) -> Demand:
    """The job as it is after the first phase: on `size` GPUs, whole. It may stay so, if it runs at all."""
    flops = known.throughput_flops[size] if size else 0.0
    table = {**demand.throughput_flops, **({size: flops} if size else {})}
    must_run = demand.must_run and size > 0
    return replace(demand, throughput_flops=table, current_gpus=size, current_flops=flops, faulted=False, must_run=must_run)


def _lasting(demands: Sequence[Demand], num_gpus: int, seconds: float) -> Request:
    return Request(demands=tuple(demands), num_gpus=num_gpus, mtbf_gpu_s=seconds * num_gpus if num_gpus else ENDLESS_GPU_S)


def _with_present_size(demand: Demand) -> Demand:
    table = demand.throughput_flops
    if demand.current_gpus and demand.current_gpus not in table:
        table = {**table, demand.current_gpus: demand.current_flops}
    return replace(demand, throughput_flops=table)


def _pinned(demand: Demand) -> Demand:
    """Its present size, and no other."""
    held = demand.current_gpus
    return replace(demand, throughput_flops={held: demand.current_flops} if held else {}, must_run=held > 0)


def _at_most_now(demand: Demand) -> Demand:
    """It goes on, as large as it was or smaller."""
    table = {size: flops for size, flops in demand.throughput_flops.items() if size <= demand.current_gpus}
    return replace(demand, throughput_flops=table, must_run=bool(table))


def _priced(loss: Loss, outlook: Outlook, kind: AlternativeKind, way: _Way) -> Alternative:
    is_new = kind is AlternativeKind.REPLACE
    back_s = outlook.replace_s if is_new else outlook.repair_s
    price = outlook.new_dollars_per_h if is_new else outlook.node_dollars_per_h
    paid_s = max(0.0, loss.horizon_s - back_s)
    healthy = loss.num_nodes * outlook.node_dollars_per_h * loss.horizon_s
    dollars = (healthy + loss.lost_nodes * price * paid_s) / 3600
    worth = outlook.dollars_per_eflop
    value = None if worth is None else way.flop / 1e18 * worth - dollars
    return Alternative(kind=kind, gpus=way.gpus, flop=way.flop, dollars=dollars, value_dollars=value, best=False, reason="")


def _merit(it: Alternative) -> tuple[float, float]:
    """What decides: the value in dollars where FLOP have one, else FLOP, and then dollars."""
    return (it.flop, -it.dollars) if it.value_dollars is None else (it.value_dollars, it.flop)


def _reason(loss: Loss, outlook: Outlook, it: Alternative, best: Alternative, every: Sequence[Alternative]) -> str:
    told = _told(loss, outlook, it)
    if it is best:
        rivals = [other for other in every if other is not it]
        second = max(rivals, key=_merit, default=None)
        return f"{told}. {_against(it, second, is_ahead=True)}" if second else f"{told}. Nothing else is possible"
    return f"{told}. {_against(it, best, is_ahead=False)}"


def _against(it: Alternative, other: Alternative, *, is_ahead: bool) -> str:
    flop, dollars = it.flop - other.flop, it.dollars - other.dollars
    flops = f"{abs(flop):.3g} FLOP {'more' if flop > 0 else 'less'}" if flop else "as many FLOP"
    money = f" for {abs(dollars):.2f} dollars {'more' if dollars > 0 else 'less'}" if abs(dollars) >= 0.005 else ""
    if not flop and not money:
        verdict = "and it disturbs less" if is_ahead else "but it disturbs more"
    else:
        verdict = "which pays" if is_ahead else "which does not pay"
    return f"Against {other.kind}: {flops}{money}, {verdict}"


def _told(loss: Loss, outlook: Outlook, it: Alternative) -> str:
    now = {demand.job: demand for demand in loss.demands}
    changes = [
        f"{job} {now[job].current_gpus} -> {size}" for job, size in sorted(it.gpus.items()) if size != now[job].current_gpus
    ]
    again = [job for job, demand in sorted(now.items()) if demand.faulted and it.gpus[job] == demand.current_gpus != 0]
    doing = f"GPUs {', '.join(changes)}" if changes else "no job changes its size"
    doing += f", {', '.join(again)} on other nodes" if again else ""
    back_s = outlook.replace_s if it.kind is AlternativeKind.REPLACE else outlook.repair_s
    lasts = f"for {back_s:.0f} s" if back_s < loss.horizon_s else "until the next failure"
    lost = math.fsum(cost(demand, it.gpus[demand.job]) for demand in now.values())
    return f"{doing} {lasts}" + (f" (that alone costs {lost:.3g} FLOP)" if lost else "")
