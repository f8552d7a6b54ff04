"""Who gets how many GPUs of which node: the problem, what no answer can beat, and a quick answer that often reaches it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Counts = dict[str, dict[str, int]]
"""GPUs by job and node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What a node offers to the jobs that change: `room` in GPUs, and `seats`, for how many such jobs (None: any)."""

    rack: str
    room: int
    seats: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A job that changes: it gets `num_gpus`, in groups of `group_gpus` that must not be spread over nodes.

    `held` are the GPUs that it may keep, in whole groups by node.
    """

    job: str
    num_gpus: int
    group_gpus: int
    held: Mapping[str, int]

    @property
    def missing(self) -> int:
        """GPUs that it lacks even if it keeps all it has; it shrinks if that is not positive."""
        return self.num_gpus - sum(self.held.values())

    @property
    def grows(self) -> bool:
        """Whether it needs GPUs that it does not have."""
        return self.missing > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The nodes and the jobs that change."""

    spots: Mapping[str, Spot]
    moves: tuple[Move, ...]

    @property
    def is_limited(self) -> bool:
        """Whether nodes take a limited number of jobs."""
        return any(spot.seats is not None for spot in self.spots.values())


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Score:
    """What a placement costs, the graver first: ranks that move, then racks, summed over the jobs that change."""

    moved: int
    racks: int


class NoRoom(Exception):
    """The quick way finds no place for `job`, which does not mean that there is none."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self.job = job


def score(problem: Problem, counts: Counts) -> Score:
    """What the placement `counts` costs."""
    moved, racks = 0, 0
    for move in problem.moves:
        got = counts[move.job]
        moved += move.num_gpus - sum(min(number, move.held.get(node, 0)) for node, number in got.items())
        racks += len({problem.spots[node].rack for node in got} - {""})
    return Score(moved=moved, racks=racks)


def bound(problem: Problem) -> Score:
    """What no placement can beat: each job is looked at as if the others that change left it everything."""
    free = _room_beside_growing(problem)
    racks = sum(_fewest_racks(problem, move, free) for move in problem.moves)
    return Score(moved=sum(max(0, move.missing) for move in problem.moves), racks=racks)


def _room_beside_growing(problem: Problem) -> dict[str, int]:
    """GPUs by node if all jobs that grow keep theirs, and those that shrink give up theirs."""
    free = {node: spot.room for node, spot in problem.spots.items()}
    for move in problem.moves:
        if move.grows:
            for node, number in move.held.items():
                free[node] -= number
    return free


def _fewest_racks(problem: Problem, move: Move, free: Mapping[str, int]) -> int:
    spots = problem.spots
    at_home: Counter[str] = Counter()
    for node, number in move.held.items():
        at_home[spots[node].rack] += number
    if not move.grows:
        return _num_racks(at_home, move.num_gpus)
    room: Counter[str] = Counter()
    for node, number in free.items():
        room[spots[node].rack] += max(number, 0) // move.group_gpus * move.group_gpus
    lacking = move.missing - sum(room.pop(rack, 0) for rack in at_home)
    return len(set(at_home) - {""}) + _num_racks(room, lacking)


def _num_racks(gpus: Mapping[str, int], wanted: int) -> int:
    """The fewest of the racks with so many `gpus` that hold `wanted` in sum; nodes of no known rack are free."""
    left, number = wanted - gpus.get("", 0), 0
    for size in sorted((size for rack, size in gpus.items() if rack), reverse=True):
        if left <= 0:
            break
        left, number = left - size, number + 1
    return number


def pack(problem: Problem) -> Counts:
    """A placement that moves as few ranks as can be: home nodes first, then home racks, then the tightest that fit.

    Raises NoRoom if this way leads nowhere, which only groups or a limit of jobs a node can cause.
    """
    counts = {move.job: _kept(problem, move) for move in problem.moves}
    free = {node: spot.room for node, spot in problem.spots.items()}
    seats = {node: spot.seats for node, spot in problem.spots.items() if spot.seats is not None}
    for job, got in counts.items():
        for node, number in got.items():
            free[node] -= number
            if node in seats:
                seats[node] = seats[node] - 1
                if seats[node] < 0:
                    raise NoRoom(job)
    # the coarsest and the greatest need first: it profits most from whole nodes
    for move in sorted(problem.moves, key=lambda move: (-move.group_gpus, -move.missing, move.job)):
        if move.grows:
            _fill(problem, move, counts[move.job], free, seats)
    return counts


def _kept(problem: Problem, move: Move) -> dict[str, int]:
    """What the job keeps of its own: the GPUs that span the fewest racks, then the fewest nodes."""
    in_rack: Counter[str] = Counter()
    for node, number in move.held.items():
        in_rack[problem.spots[node].rack] += number
    kept: dict[str, int] = {}
    left = move.num_gpus
    for node in sorted(move.held, key=lambda node: _fullest_first(problem.spots[node].rack, node, in_rack, move.held)):
        if left:
            kept[node] = min(left, move.held[node])
            left -= kept[node]
    return kept


def _fullest_first(rack: str, node: str, in_rack: Mapping[str, int], held: Mapping[str, int]) -> tuple[int, str, int, str]:
    # a node of no known rack costs no rack
    return -in_rack[rack] if rack else -sum(in_rack.values()), rack, -held[node], node


def _fill(problem: Problem, move: Move, got: dict[str, int], free: dict[str, int], seats: dict[str, int]) -> None:
    """Give the job what it lacks, in whole groups: from its own nodes, its own racks, then one more rack at a time."""
    size, spots = move.group_gpus, problem.spots
    homes = {spots[node].rack for node in got} | {""}
    own, near = _Pool(), _Pool()
    far: dict[str, _Pool] = defaultdict(_Pool)
    for node, number in free.items():
        if number >= size and (node in got or seats.get(node, 1) > 0):
            rack = spots[node].rack
            pool = own if node in got else near if rack in homes else far[rack]
            pool.add(node, number // size * size)
    lacking = move.missing
    pools = [near, own]
    while lacking:
        if not pools and not far:
            raise NoRoom(move.job)
        pool = pools.pop() if pools else _next_rack(far, lacking)
        for node, number in pool.take(lacking):
            if node not in got and node in seats:
                seats[node] -= 1
            got[node] = got.get(node, 0) + number
            free[node] -= number
            lacking -= number


class _Pool:
    """Nodes by the room that they have."""

    def __init__(self) -> None:
        self.num_gpus = 0
        self._names: dict[int, list[str]] = defaultdict(list)

    def add(self, node: str, room: int) -> None:
        self.num_gpus += room
        self._names[room].append(node)

    def take(self, lacking: int) -> Iterator[tuple[str, int]]:
        """Nodes with the GPUs to take from each: the tightest that covers all that is lacking, else the roomiest."""
        for names in self._names.values():
            names.sort(reverse=True)
        while lacking and self._names:
            room = min(self._names, key=lambda room: _fit(room, lacking))
            node = self._names[room].pop()
            if not self._names[room]:
                del self._names[room]
            number = min(room, lacking)
            lacking -= number
            yield node, number


def _next_rack(far: dict[str, _Pool], lacking: int) -> _Pool:
    """Takes out the tightest rack that covers all that is lacking, else the roomiest."""
    return far.pop(min(far, key=lambda rack: (_fit(far[rack].num_gpus, lacking), rack)))


def _fit(room: int, lacking: int) -> tuple[bool, int]:
    return room < lacking, room if room >= lacking else -room
