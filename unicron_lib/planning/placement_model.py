"""Placement as an integer programme, for what the quick way does not settle.

While the jobs can keep as many GPUs as there is any hope for, the least that moves is a constraint and only racks are
left to choose: `keeping`. Else ranks and racks are weighed against each other: `moving`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from unicron_lib.planning import milp
from unicron_lib.planning.knapsack import Integers
from unicron_lib.planning.packing import Counts, Move, NoRoom, Problem, Spot, pack, score


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the solver said: `counts` is None if there is nothing, or (not `proved`) if it found nothing in time."""

    counts: Counts | None
    proved: bool


def keeping(problem: Problem, *, time_limit_s: float) -> Found:
    """The fewest racks when every job keeps all that it can; of the nodes in them as few as the quick way takes.

    Nodes that take any number of jobs in any share are alike within a rack: then the model is one of racks.
    """
    is_free = not problem.is_limited and all(move.group_gpus == 1 for move in problem.moves)
    found = _solve(_by_rack(problem) if is_free else problem, keeps=True, time_limit_s=time_limit_s)
    if found.counts is None:
        return found
    quotas = found.counts if is_free else _sums(problem, found.counts)
    return Found(counts=_tidied(problem, quotas, None if is_free else found.counts), proved=found.proved)


def moving(problem: Problem, *, time_limit_s: float) -> Found:
    """The fewest ranks that move, then the fewest racks."""
    found = _solve(problem, keeps=False, time_limit_s=time_limit_s)
    if found.counts is None:
        return found
    return Found(counts=_tidied(problem, _sums(problem, found.counts), found.counts), proved=found.proved)


def _by_rack(problem: Problem) -> Problem:
    """The same with racks in place of their nodes."""
    room: dict[str, int] = defaultdict(int)
    for spot in problem.spots.values():
        room[spot.rack] += spot.room
    held = _sums(problem, {move.job: dict(move.held) for move in problem.moves})
    moves = (Move(job=m.job, num_gpus=m.num_gpus, group_gpus=1, held=held[m.job]) for m in problem.moves)
    return Problem(spots={rack: Spot(rack=rack, room=number) for rack, number in room.items()}, moves=tuple(moves))


def _sums(problem: Problem, counts: Counts) -> Counts:
    """GPUs by job and rack."""
    sums: Counts = {}
    for job, on_nodes in counts.items():
        in_rack: dict[str, int] = defaultdict(int)
        for node, number in on_nodes.items():
            in_rack[problem.spots[node].rack] += number
        sums[job] = dict(in_rack)
    return sums


def _tidied(problem: Problem, quotas: Counts, found: Counts | None) -> Counts:
    """The quick way within each rack, where it keeps what the solver `found`: that may be scattered over nodes."""
    tidy: Counts = {move.job: {} for move in problem.moves}
    try:
        for rack in sorted({spot.rack for spot in problem.spots.values()}):
            spots = {node: spot for node, spot in problem.spots.items() if spot.rack == rack}
            moves = (
                Move(
                    job=move.job,
                    num_gpus=quotas[move.job].get(rack, 0),
                    group_gpus=move.group_gpus,
                    held={node: number for node, number in move.held.items() if node in spots},
                )
                for move in problem.moves
            )
            for job, got in pack(Problem(spots=spots, moves=tuple(moves))).items():
                tidy[job] |= got
    except NoRoom:
        assert found is not None, "without limits and groups whatever a rack has room for fits"
        return found
    return tidy if found is None or score(problem, tidy) <= score(problem, found) else found


def _solve(problem: Problem, *, keeps: bool, time_limit_s: float) -> Found:
    model = _Model(problem=problem, keeps=keeps)
    model.build()
    answer = milp.minimise(model.program(), time_limit_s=time_limit_s)
    if answer.values is None:
        return Found(counts=None, proved=answer.status == milp.INFEASIBLE)
    return Found(counts=model.counts(answer.values), proved=answer.proved)


@dataclass(slots=True, kw_only=True)
class _Model:
    """Collects columns and rows; `groups` are the columns that count the groups of a job on a spot."""

    problem: Problem
    keeps: bool
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    groups: dict[int, tuple[Move, str]] = field(default_factory=dict)

    def build(self) -> None:
        """Fill in everything."""
        kept = self._kept_by_growing()
        present: dict[str, list[tuple[int, int]]] = defaultdict(list)
        used: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for move in self.problem.moves:
            in_rack: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for node, spot in self.problem.spots.items():
                for column in self._use(move, node, kept[node]):
                    used[node].append((column, move.group_gpus))
                    in_rack[spot.rack].append((column, move.group_gpus))
                    if spot.seats is not None:
                        present[node].append((self._switch(column), 1))
            self._row([entry for entries in in_rack.values() for entry in entries], move.num_gpus, exact=True)
            self._enter(move, in_rack)
        for node, spot in self.problem.spots.items():
            self._row(used[node], spot.room)
            if spot.seats is not None:
                self._row(present[node], spot.seats)

    def program(self) -> milp.Program:
        """For the solver."""
        return milp.Program(
            cost=np.array(self.cost, dtype=np.int64),
            at_least=np.array(self.lower, dtype=np.int64),
            at_most=np.array(self.upper, dtype=np.int64),
            entries=np.array(self.entries, dtype=np.int64).reshape(-1, 3),
            limits=np.array(self.limits, dtype=np.int64),
            exact=np.array(self.exact, dtype=np.bool_),
        )

    def counts(self, values: Integers) -> Counts:
        """The GPUs by job and spot that the solver's `values` mean."""
        found: Counts = {move.job: {} for move in self.problem.moves}
        for column, (move, node) in self.groups.items():
            if number := int(values[column]):
                found[move.job][node] = number * move.group_gpus
        return found

    def _kept_by_growing(self) -> dict[str, int]:
        kept = dict.fromkeys(self.problem.spots, 0)
        for move in self.problem.moves:
            if move.grows:
                for node, number in move.held.items():
                    kept[node] += number
        return kept

    def _column(self, lower: int, upper: int, cost: int) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        return len(self.cost) - 1

    def _row(self, entries: list[tuple[int, int]], limit: int, *, exact: bool = False) -> None:
        if entries or (exact and limit):
            self.entries += [(len(self.limits), column, value) for column, value in entries]
            self.limits.append(limit)
            self.exact.append(exact)

    def _use(self, move: Move, node: str, kept: int) -> Iterator[int]:
        """The column of the job's groups on a spot, if it can have any."""
        size, held, room = move.group_gpus, move.held.get(node, 0), self.problem.spots[node].room
        lower, upper = 0, min(room, move.num_gpus) // size
        if self.keeps:
            lower = held // size if move.grows else 0
            upper = (held + max(0, room - kept)) // size if move.grows else min(held, move.num_gpus) // size
        if not upper:
            return
        column = self._column(lower, upper, 0)
        self.groups[column] = move, node
        if held and not self.keeps:
            stays = self._column(0, held // size, -size * self._worth_of_staying)
            self._row([(stays, 1), (column, -1)], 0)
        yield column

    def _switch(self, column: int) -> int:
        """A column that is 1 if `column` is not 0."""
        switch = self._column(int(self.lower[column] > 0), 1, 0)
        self._row([(column, 1), (switch, -self.upper[column])], 0)
        return switch

    def _enter(self, move: Move, in_rack: dict[str, list[tuple[int, int]]]) -> None:
        for rack, columns in in_rack.items():
            if rack:
                most = min(move.num_gpus, sum(self.upper[column] * size for column, size in columns))
                self._row([*columns, (self._column(0, 1, 1), -most)], 0)

    @property
    def _worth_of_staying(self) -> int:
        """More than all racks that all jobs could span."""
        return 1 + len({spot.rack for spot in self.problem.spots.values()}) * len(self.problem.moves)
