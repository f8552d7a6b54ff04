"""Placement as an integer programme, for what the quick way does not settle.

While the jobs can keep as many GPUs as there is any hope for, the least that moves is a constraint and only racks and
nodes are left to choose: `keeping`. Else ranks, racks and nodes are weighed against each other: `moving`.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from unicron_lib.planning import milp
from unicron_lib.planning.packing import Counts, Move, Problem, Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the solver said: `counts` is None if there is nothing, or (not `proved`) if it found nothing in time."""

    counts: Counts | None
    proved: bool


def keeping(problem: Problem, *, time_limit_s: float) -> Found:
    """The fewest racks, then the fewest nodes, when every job keeps all that it can."""
    return _solve(_Model(problem=problem, keeps=True), time_limit_s)


def moving(problem: Problem, *, time_limit_s: float) -> Found:
    """The fewest ranks that move, then racks, then nodes."""
    return _solve(_Model(problem=problem, keeps=False), time_limit_s)


INFEASIBLE = "infeasible"


def _solve(model: "_Model", time_limit_s: float) -> Found:
    model.build()
    answer = milp.minimise(model.program(), time_limit_s=time_limit_s)
    if answer.values is None:
        return Found(counts=None, proved=answer.status == INFEASIBLE)
    return Found(counts=model.counts(answer.values), proved=answer.proved)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bin:
    """Nodes that are alike. More than one can only be had whole, by `room`."""

    names: tuple[str, ...]
    spot: Spot
    held: Mapping[str, int]


def _bins(problem: Problem, *, aggregate: bool) -> list[_Bin]:
    """The nodes, those in numbers that are alike as one bin, except as many as fragments may be needed of.

    Where all sizes of groups divide each other and the room, a solution can be rearranged on nodes that are alike so
    that no more of them than jobs are broken into: the bins lose nothing.
    """
    held: dict[str, dict[str, int]] = defaultdict(dict)
    for move in problem.moves:
        for node, number in move.held.items():
            held[node][move.job] = number
    alike: dict[object, list[str]] = defaultdict(list)
    for node, spot in sorted(problem.spots.items()):
        mine = held[node]
        if not spot.room:
            continue
        is_plain = not mine or list(mine.values()) == [spot.room]
        alike[(spot.rack, spot.room, tuple(mine)) if aggregate and is_plain else node].append(node)
    bins: list[_Bin] = []
    for names in alike.values():
        spot, mine = problem.spots[names[0]], held[names[0]]
        single = names[: len(problem.moves)]
        bins += [_Bin(names=(name,), spot=spot if len(names) > 1 else problem.spots[name], held=mine) for name in single]
        if len(names) > len(single):
            bins.append(_Bin(names=tuple(names[len(single) :]), spot=spot, held=mine))
    return bins


def _are_nested(problem: Problem) -> bool:
    sizes = sorted({move.group_gpus for move in problem.moves})
    return all(large % small == 0 for small, large in itertools.pairwise(sizes)) and all(
        spot.room % sizes[-1] == 0 for spot in problem.spots.values()
    )


@dataclass(slots=True, kw_only=True)
class _Model:
    """Collects columns and rows; `uses` are the columns that stand for GPUs: job, bin, GPUs that one unit means."""

    problem: Problem
    keeps: bool
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    uses: dict[int, tuple[Move, _Bin, int]] = field(default_factory=dict)
    seats: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    rooms: dict[tuple[str, ...], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def build(self) -> None:
        """Fill in everything."""
        problem = self.problem
        bins = _bins(problem, aggregate=self.keeps and not problem.is_limited and _are_nested(problem))
        kept = self._kept_by_growing(bins)
        for move in problem.moves:
            self._job(move, bins, kept)
        for one in bins:
            whole = len(one.names) > 1
            self._row(self.rooms[one.names], len(one.names) if whole else one.spot.room)
            if one.spot.seats is not None:
                self._row([(column, 1) for column in self.seats[one.names[0]]], one.spot.seats)

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

    def counts(self, values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Counts:
        """The GPUs by job and node that the solver's `values` mean."""
        found: Counts = {move.job: {} for move in self.problem.moves}
        taken: dict[tuple[str, ...], int] = defaultdict(int)
        for column, (move, one, unit) in self.uses.items():
            number = int(values[column])
            if not number:
                continue
            if len(one.names) == 1:
                found[move.job][one.names[0]] = number * unit
                continue
            first = taken[one.names]
            taken[one.names] += number
            found[move.job].update(dict.fromkeys(one.names[first : first + number], unit))
        return found

    def _kept_by_growing(self, bins: list[_Bin]) -> dict[str, int]:
        growing = {move.job for move in self.problem.moves if move.grows}
        return {one.names[0]: sum(held for job, held in one.held.items() if job in growing) for one in bins}

    @property
    def _rack_cost(self) -> int:
        return 1 + sum(min(move.num_gpus // move.group_gpus, len(self.problem.spots)) for move in self.problem.moves)

    @property
    def _move_cost(self) -> int:
        racks = len({spot.rack for spot in self.problem.spots.values()})
        return self._rack_cost * (1 + racks * len(self.problem.moves))

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

    def _job(self, move: Move, bins: list[_Bin], kept: Mapping[str, int]) -> None:
        gpus: list[tuple[int, int]] = []
        in_rack: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for one in bins:
            for column, unit, present in self._uses(move, one, kept[one.names[0]]):
                gpus.append((column, unit))
                in_rack[one.spot.rack].append((column, unit))
                self.uses[column] = (move, one, unit)
                if present is not None:
                    self.seats[one.names[0]].append(present)
        self._row(gpus, move.num_gpus, exact=True)
        for rack, columns in in_rack.items():
            if rack:
                most = min(move.num_gpus, sum(self.upper[column] * unit for column, unit in columns))
                entered = self._column(0, 1, self._rack_cost)
                self._row([*columns, (entered, -most)], 0)

    def _uses(self, move: Move, one: _Bin, kept: int) -> Iterator[tuple[int, int, int | None]]:
        """The column of the job's use of a bin, if it can use it: column, GPUs of one unit, column of its presence."""
        size, held, room = move.group_gpus, one.held.get(move.job, 0), one.spot.room
        if len(one.names) > 1:
            if held or (move.grows and not kept):
                column = self._column(len(one.names) if held and move.grows else 0, len(one.names), 1)
                self.rooms[one.names].append((column, 1))
                yield column, room, None
            return
        lower, upper = 0, min(room, move.num_gpus) // size
        if self.keeps:
            lower = held // size if move.grows else 0
            upper = (held + max(0, room - kept)) // size if move.grows else held // size
        if not upper:
            return
        column, present = self._column(lower, upper, 0), self._column(1 if lower else 0, 1, 1)
        self._row([(column, 1), (present, -upper)], 0)
        self.rooms[one.names].append((column, size))
        if not self.keeps and held:
            stays = self._column(0, held // size, -self._move_cost * size)
            self._row([(stays, 1), (column, -1)], 0)
        yield column, size, present
