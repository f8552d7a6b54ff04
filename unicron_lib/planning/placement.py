"""Which GPUs each job gets: whoever does not change stays put, whoever does moves as little as can be, certified."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot
from unicron_lib.errors import InfeasibleError
from unicron_lib.planning import packing, placement_model
from unicron_lib.planning.packing import Counts, Move, Problem, Spot

Slots = tuple[Slot, ...]

BETTER_S = 0.5
"""The solver may take so long where there is an answer that it could only better: jobs wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a placement has to keep to.

    At most `max_jobs_per_node` jobs share a node (None: any number). `group_gpus` says which jobs have groups of GPUs
    that must not be spread over nodes, as those of tensor parallelism must not. The solver has `time_limit_s`.
    """

    max_jobs_per_node: int | None = None
    group_gpus: Mapping[str, int] = field(default_factory=dict)
    time_limit_s: float = 5.0


FREELY = Rules()


class Method(StrEnum):
    """What found a placement."""

    PACKED = "packed"
    SOLVED = "solved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs of each job in the order of ranks.

    Over the jobs that change, `moved` ranks start on GPUs that their job did not have, and `racks` are spanned in sum.
    `certified` says that no placement has fewer of the first and, among those, fewer of the second.
    """

    slots: dict[str, Slots]
    moved: int
    racks: int
    certified: bool
    method: Method


class CannotBePlaced(InfeasibleError):
    """There are enough GPUs, but not in the right places for `job`; `proved` if that is certain."""

    def __init__(self, message: str, *, job: str, proved: bool) -> None:
        super().__init__(message)
        self.job = job
        self.proved = proved


def place(
    wanted: Mapping[str, int], current: Mapping[str, Slots], nodes: Sequence[Node], rules: Rules = FREELY
) -> dict[str, Slots]:
    """The GPUs of each job on `nodes`, as `arrange` finds them."""
    return arrange(wanted, current, nodes, rules).slots


def arrange(wanted: Mapping[str, int], current: Mapping[str, Slots], nodes: Sequence[Node], rules: Rules = FREELY) -> Placement:
    """Place all jobs on `nodes`; neighbours on a node are neighbours in rank.

    A job whose size stays and whose GPUs are all among `nodes` keeps them as they are. Others move as few ranks as can
    be, then span as few racks; of their nodes they take few, the tightest first. The solver is asked only where the
    quick way may have missed that. Raises ValueError if `wanted` exceeds the GPUs of `nodes`, CannotBePlaced if the
    rules leave no way.
    """
    offered = {slot for node in nodes for slot in node.slots}
    if sum(wanted.values()) > len(offered):
        raise ValueError(f"{sum(wanted.values())} GPUs are wanted, the nodes have {len(offered)}")
    held = {job: current.get(job, ()) for job in wanted}
    staying = {job: own for job, own in held.items() if len(own) == wanted[job] and offered.issuperset(own)}
    problem = _problem(wanted, current, nodes, staying, rules)
    counts, certified, method = _search(problem, rules.time_limit_s)
    cost = packing.score(problem, counts)
    placed = _slots(counts, current, offered, staying)
    return Placement(
        slots={job: placed[job] for job in wanted}, moved=cost.moved, racks=cost.racks, certified=certified, method=method
    )


def _problem(
    wanted: Mapping[str, int], current: Mapping[str, Slots], nodes: Sequence[Node], staying: Mapping[str, Slots], rules: Rules
) -> Problem:
    taken = Counter(slot.node for slots in staying.values() for slot in slots)
    guests = Counter(node for slots in staying.values() for node in {slot.node for slot in slots})
    limit = rules.max_jobs_per_node
    sizes = {node.id: node.num_gpus for node in nodes}
    moves = []
    for job in sorted(set(wanted) - set(staying)):
        size = rules.group_gpus.get(job, 1)
        if wanted[job] % size:
            raise ValueError(f"{job} gets {wanted[job]} GPUs, not a multiple of its groups of {size}")
        here = Counter(slot.node for slot in current.get(job, ()) if slot.gpu < sizes.get(slot.node, 0))
        held = {node: number // size * size for node, number in here.items() if number >= size}
        moves.append(Move(job=job, num_gpus=wanted[job], group_gpus=size, held=held))
    spots = {
        node.id: Spot(
            rack=node.rack,
            room=node.num_gpus - taken[node.id],
            seats=None if limit is None else max(0, limit - guests[node.id]),
        )
        for node in nodes
    }
    return Problem(spots=spots, moves=tuple(moves))


def _search(problem: Problem, time_limit_s: float) -> tuple[Counts, bool, Method]:
    """The placement, whether it is certified, and what found it."""
    least = packing.bound(problem)
    quick, stuck = None, ""
    try:
        quick = packing.pack(problem)
    except packing.NoRoom as error:
        stuck = error.job
    if quick is not None and packing.score(problem, quick) <= least:
        return quick, True, Method.PACKED
    limit_s = min(time_limit_s, BETTER_S) if quick is not None else time_limit_s
    found = placement_model.keeping(problem, time_limit_s=limit_s)
    if found.counts is None and quick is None:
        found = placement_model.moving(problem, time_limit_s=time_limit_s)
    solved = found.counts
    if solved is None and quick is None:
        why = "no node has room for it within the limits" if found.proved else "no place was found in the time given"
        raise CannotBePlaced(f"{stuck} cannot be placed: {why}", job=stuck, proved=found.proved)
    if quick is None or (solved is not None and packing.score(problem, solved) <= packing.score(problem, quick)):
        assert solved is not None
        return solved, found.proved or packing.score(problem, solved) <= least, Method.SOLVED
    return quick, False, Method.PACKED


def _slots(counts: Counts, current: Mapping[str, Slots], offered: set[Slot], staying: Mapping[str, Slots]) -> dict[str, Slots]:
    """Name the GPUs: on each node a job keeps its own first."""
    placed = dict(staying)
    lacking: dict[str, dict[str, int]] = {}
    for job, on_nodes in counts.items():
        own: dict[str, list[Slot]] = defaultdict(list)
        for slot in sorted(slot for slot in current.get(job, ()) if slot in offered):
            own[slot.node].append(slot)
        mine = {node: own[node][:number] for node, number in on_nodes.items()}
        placed[job] = tuple(slot for slots in mine.values() for slot in slots)
        lacking[job] = {node: number - len(mine[node]) for node, number in on_nodes.items()}
    free: dict[str, list[Slot]] = {}
    for slot in sorted(offered.difference(*placed.values())):
        free.setdefault(slot.node, []).append(slot)
    for job in sorted(lacking):
        added: list[Slot] = []
        for node, number in lacking[job].items():
            if number:
                added += free[node][:number]
                del free[node][:number]
        placed[job] = tuple(sorted((*placed[job], *added)))
    return placed
