"""Plans: who gets which GPUs, why, and the steps from here to there."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is in a layout: its slice of every cut tensor, its pipeline stage, its replica; all from 0."""

    tp: int = 0
    pp: int = 0
    dp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of tensor, pipeline and data parallelism.

    A replica is `tp * pp` ranks with consecutive numbers, stage by stage: lost together, and placed together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs that the layout takes."""
        return self.tp * self.pp * self.dp

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp

    @property
    def shape(self) -> str:
        """How a replica is cut, as people and the journal are told it."""
        return f"tp={self.tp} pp={self.pp}"

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        replica, part = divmod(rank, self.replica_size)
        return Place(tp=part % self.tp, pp=part // self.tp, dp=replica)

    def part(self, rank: int) -> str:
        """The name of what a rank has of a state, "" if that is all of it."""
        place = self.place(rank)
        return f"tp{place.tp}of{self.tp}-pp{place.pp}of{self.pp}" if self.replica_size > 1 else ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that a state has, in the order of a replica's ranks."""
        return tuple(map(self.part, range(self.replica_size)))


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One GPU of a node."""

    node: str
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A generation of a job on its GPUs: `slots[r]` is where rank r lives."""

    job: str
    generation: int
    layout: Layout
    slots: tuple[Slot, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs that the job gets."""
        return len(self.slots)

    def ranks_on(self, node: str) -> tuple[tuple[int, int], ...]:
        """Pairs (rank, gpu) on `node`."""
        return tuple((rank, slot.gpu) for rank, slot in enumerate(self.slots) if slot.node == node)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in the order of their first rank."""
        return tuple(dict.fromkeys(slot.node for slot in self.slots))

    @property
    def homes(self) -> dict[str, tuple[str, ...]]:
        """The nodes of the ranks that have each part of the state, by its name."""
        nodes: dict[str, dict[str, None]] = {part: {} for part in self.layout.parts}
        for rank, slot in enumerate(self.slots):
            nodes[self.layout.part(rank)][slot.node] = None
        return {part: tuple(found) for part, found in nodes.items()}


class PlanKind(StrEnum):
    """How far a plan reaches."""

    REATTEMPT = "reattempt"
    RESTART = "restart"
    REALLOCATE = "reallocate"


class StepKind(StrEnum):
    """What a step of a transition does to one job."""

    DRAIN = "drain"
    STOP = "stop"
    RESTORE = "restore"
    LAUNCH = "launch"
    RESUME = "resume"


STAGES = ((StepKind.DRAIN,), (StepKind.STOP, StepKind.RESTORE), (StepKind.LAUNCH,), (StepKind.RESUME,))
"""Jobs go through these together: no job is launched before every GPU that it takes over is free.

What commits while STOP and RESTORE run side by side is either admitted by RESTORE's fence or refused.
"""
STEP_ORDER = tuple(kind for stage in STAGES for kind in stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Ranks of earlier generations on the GPUs `kept` live on in a new one: with their process, and with their memory.

    They park at once to `abort` what has failed, else together at an iteration's end. `condemned` ranks are known to hang.
    """

    kept: tuple[Slot, ...]
    abort: bool
    condemned: tuple[int, ...] = ()

    def gpus_on(self, node: str) -> tuple[int, ...]:
        """Those of the GPUs that are on `node`."""
        return tuple(slot.gpu for slot in self.kept if slot.node == node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One idempotent step; `id` derives from the plan and the content and is the key of its effect.

    `generation` is the one that the step makes ready (LAUNCH, ...) or everything below it (DRAIN, STOP).
    `nodes` are those that the step talks to. With a `hold`, DRAIN and STOP leave ranks alive for LAUNCH to take over.
    """

    id: str
    kind: StepKind
    job: str
    generation: int
    nodes: tuple[str, ...] = ()
    hold: Hold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """A job goes back to a checkpoint from before iteration `first`.

    It leaves out what `first` to `last` consumed, unless it `repeats` them: then the data had no part in it.
    """

    first: int
    last: int
    repeats: bool = False


class AlternativeKind(StrEnum):
    """What can be done when a node is lost; the first of equals is the one that disturbs the least."""

    WAIT = "wait"
    SHRINK = "shrink"
    TAKE = "take"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to go on after the loss of a node, priced until the next failure is expected.

    `gpus` is what jobs hold until the node is back. `flop` is weighted, less what transitions cost; `dollars` is what
    the nodes cost meanwhile, and `value_dollars` what the FLOP are worth less that, None if nobody has said what they are
    worth. One alternative is `best`.
    """

    kind: AlternativeKind
    gpus: Mapping[str, int]
    flop: float
    dollars: float
    value_dollars: float | None
    best: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the cluster will look like, and why.

    `assignments` holds the jobs that the plan moves or (re)starts, jobs that it leaves alone are not in it; `paused` are
    the jobs that lose all GPUs, `rewinds` those that go back because of their loss or of wrong results. `gpus` is the whole
    allocation. `gain` and `upper_bound` in FLOP (paper, section 5).
    `id` derives from the content. `alternatives` are filled in for the loss of a node.
    """

    id: str
    kind: PlanKind
    incidents: tuple[str, ...]
    attempt: int
    basis_seq: int
    reason: str
    gpus: Mapping[str, int] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()
    paused: tuple[str, ...] = ()
    stopped: Mapping[str, str] = field(default_factory=dict)
    quarantined: Mapping[str, str] = field(default_factory=dict)
    rewinds: Mapping[str, Rewind] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    gain: float = 0.0
    upper_bound: float = 0.0
    optimal: bool = True
    method: str = ""
    solve_s: float = 0.0
    alternatives: tuple[Alternative, ...] = ()

    @property
    def gap(self) -> float:
        """Certified relative distance from the optimum, 0.0 when it is the optimum."""
        return 0.0 if self.optimal else (self.upper_bound - self.gain) / max(abs(self.upper_bound), 1e-30)

    def assignment_of(self, job: str) -> Assignment | None:
        """The new assignment of `job` if this plan moves it."""
        return next((a for a in self.assignments if a.job == job), None)


def content_id(prefix: str, *parts: object) -> str:
    """A short id that is the same for the same content: `prefix-` and 10 hex digits of SHA-256."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()
    return f"{prefix}-{digest[:10]}"
