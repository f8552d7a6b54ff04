"""Generators of traces: the two of the Unicron paper, and a parametric one. The same seed gives the same trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf, log
from random import Random
from types import MappingProxyType

from unicron_lib.domain.failures import DEFAULT_SEVERITY, ErrorKind, Severity
from unicron_lib.errors import UserError
from unicron_lib.simulation.faults import Fault, Trace

HOUR_S, DAY_S = 3600.0, 86400.0

_K = ErrorKind
FIGURE_1: Mapping[ErrorKind, float] = MappingProxyType(
    {
        _K.NCCL_TIMEOUT: 10.1,
        _K.ECC_ERROR: 5.0,
        _K.NVLINK_ERROR: 4.5,
        _K.NETWORK_ERROR: 4.0,
        _K.LINK_FLAPPING: 3.9,
        _K.OTHER: 3.3,
        _K.TASK_HANG: 3.1,
        _K.ILLEGAL_MEMORY_ACCESS: 2.1,
        _K.INVALID_DMA_MAPPING: 2.1,
        _K.CONNECTION_REFUSED: 2.1,
        _K.CUDA_ERROR: 1.6,
        _K.CONNECTION_RESET: 1.0,
        _K.GPU_DRIVER_ERROR: 0.6,
    }
)
"""Per cent of all training tasks that end so, by the Unicron paper's Figure 1; the rest, 56.6%, finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """How long a node is away: log-normal with `median_s`, `sigma` of the logarithm, and at most `most_s`."""

    median_s: float
    sigma: float
    most_s: float = inf

    def draw(self, random: Random) -> float:
        """Seconds of one repair."""
        return min(random.lognormvariate(log(self.median_s), self.sigma), self.most_s)


STEPFUN_REPAIR = Repair(median_s=15.0 * HOUR_S, sigma=2.52, most_s=60 * DAY_S)
"""Fitted to StepFun's trace of 400 servers: mu 2.71 (hours), sigma 2.52; beyond 60 days we count a node as replaced."""

DAYS = Repair(median_s=5 * DAY_S, sigma=0.3)
A_DAY = Repair(median_s=1 * DAY_S, sigma=0.3)
"""Of trace-a and trace-b. Fitted to the paper's ratios to Megatron, since it does not tell them: no evidence for these."""


def trace_a(seed: int, *, num_nodes: int = 16, repair: Repair = DAYS) -> Trace:
    """Eight weeks with 10 faults of SEV1 and 33 others, after the paper's trace-a.

    Times are uniform, and so are nodes, of those at work then.
    """
    return _counted("trace-a", seed, 56 * DAY_S, sev1=10, others=33, num_nodes=num_nodes, repair=repair)


def trace_b(seed: int, *, num_nodes: int = 16, repair: Repair = A_DAY) -> Trace:
    """Seven days at 20 times the rate: 26 faults of SEV1 and 80 others, after the paper's trace-b."""
    return _counted("trace-b", seed, 7 * DAY_S, sev1=26, others=80, num_nodes=num_nodes, repair=repair)


def _counted(name: str, seed: int, duration_s: float, *, sev1: int, others: int, num_nodes: int, repair: Repair) -> Trace:
    random = Random(f"{name}/{seed}")  # noqa: S311 chance, not secrecy
    grave = {kind: share for kind, share in FIGURE_1.items() if DEFAULT_SEVERITY[kind] is Severity.SEV1}
    light = {kind: share for kind, share in FIGURE_1.items() if kind not in grave}
    kinds = [*_draw(grave, sev1, random), *_draw(light, others, random)]
    back_s = [0.0] * num_nodes
    faults = []
    for at_s, kind in sorted((random.uniform(0, duration_s), kind) for kind in kinds):
        present = [node for node in range(num_nodes) if back_s[node] <= at_s]
        fault = _fault(random, at_s=at_s, kind=kind, node=random.choice(present or range(num_nodes)), repair=repair)
        back_s[fault.node] = at_s + fault.repair_s
        faults.append(fault)
    source = f"generated, seed {seed}: counts and kinds of the Unicron paper; repair times fitted"
    return Trace(name=name, source=source, duration_s=duration_s, faults=tuple(faults))


def _draw(mix: Mapping[ErrorKind, float], number: int, random: Random) -> list[ErrorKind]:
    return random.choices(list(mix), weights=list(mix.values()), k=number)


def _fault(random: Random, *, at_s: float, kind: ErrorKind, node: int, repair: Repair) -> Fault:
    away_s = repair.draw(random) if DEFAULT_SEVERITY[kind] is Severity.SEV1 else 0.0
    return Fault(at_s=at_s, kind=kind, node=node, rank_share=random.random(), repair_s=away_s)


def _in_order(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.node, fault.kind)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """From `from_s` to `until_s` faults are `factor` times as frequent, as in a heat wave."""

    from_s: float
    until_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """How often what breaks.

    `per_node_day` is the mean rate of faults. With `spread` above 0, nodes differ: their rates are gamma-distributed with
    that coefficient of variation (lemons). `burstiness` is that of the gaps between two faults of the cluster: 1.0 is
    Poisson, StepFun's trace has 1.76. `kinds` are weights. Raises UserError for numbers out of range.
    """

    per_node_day: float
    spread: float = 0.0
    burstiness: float = 1.0
    kinds: Mapping[ErrorKind, float] = field(default_factory=lambda: FIGURE_1)
    repair: Repair = STEPFUN_REPAIR
    episodes: tuple[Episode, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.per_node_day < inf and 0 <= self.spread < inf and 0 < self.burstiness < inf):
            raise UserError(f"a hazard needs per_node_day and burstiness above 0 and a spread of 0 or more, this is {self}")
        if any(not (0 <= e.from_s < e.until_s and 0 <= e.factor < inf) for e in self.episodes):
            raise UserError("an episode needs from_s before until_s and a factor of 0 or more")


def generated(hazard: Hazard, seed: int, *, num_nodes: int, duration_s: float, name: str = "generated") -> Trace:
    """A trace of `hazard` for a cluster of `num_nodes` nodes."""
    random = Random(f"{name}/{seed}")  # noqa: S311 chance, not secrecy
    shape = 1 / hazard.spread**2 if hazard.spread else inf
    rates = [random.gammavariate(shape, 1 / shape) if hazard.spread else 1.0 for _ in range(num_nodes)]
    ladder = list(accumulate(rates))
    # lemons make the whole cluster worse: the rate of these nodes counts, not the mean one
    times = _times(hazard, random, gap_s=DAY_S / (hazard.per_node_day * ladder[-1]), duration_s=duration_s)
    nodes = random.choices(range(num_nodes), cum_weights=ladder, k=len(times))
    kinds = _draw(hazard.kinds, len(times), random)
    faults = [
        _fault(random, at_s=at_s, kind=kind, node=node, repair=hazard.repair)
        for at_s, kind, node in zip(times, kinds, nodes, strict=True)
    ]
    source = f"generated, seed {seed}: {hazard.per_node_day:g} faults a node-day, burstiness {hazard.burstiness:g}"
    return Trace(name=name, source=source, duration_s=duration_s, faults=_in_order(faults))


def _times(hazard: Hazard, random: Random, *, gap_s: float, duration_s: float) -> list[float]:
    """When faults happen: gaps in units of wear, which time brings about faster during an episode."""
    shape = 1 / hazard.burstiness**2
    edges = sorted({0.0, duration_s, *(min(t, duration_s) for e in hazard.episodes for t in (e.from_s, e.until_s))})
    pieces = [(start, end, _speed(hazard, start)) for start, end in pairwise(edges)]
    times, worn_s = [], 0.0
    due_s = random.gammavariate(shape, gap_s / shape)
    for start, end, speed in pieces:
        length_s = (end - start) * speed
        while due_s < worn_s + length_s:
            times.append(start + (due_s - worn_s) / speed)
            due_s += random.gammavariate(shape, gap_s / shape)
        worn_s += length_s
    return times


def _speed(hazard: Hazard, at_s: float) -> float:
    speed = 1.0
    for episode in hazard.episodes:
        speed *= episode.factor if episode.from_s <= at_s < episode.until_s else 1.0
    return speed
