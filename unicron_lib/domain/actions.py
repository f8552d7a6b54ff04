"""What to do next: the answers of `recovery.decide`, each with a reason that a person on call understands."""

from dataclasses import dataclass, field

from unicron_lib.domain.plans import PlanKind, Rewind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Nothing is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Too early to decide: look again at `until`, or when the next event comes."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Carry on with the plan that is already decided."""

    plan: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Respond:
    """Make a plan for `incidents`.

    `restart` are the jobs to start again where they are; with kind REALLOCATE the whole cluster is planned anew, and
    `faulted` are the jobs that lost a worker. `rewinds` are jobs that go back. `supersedes` is the
    unfinished plan that the new one replaces.
    """

    kind: PlanKind
    incidents: tuple[str, ...]
    attempt: int
    reason: str
    faulted: tuple[str, ...] = ()
    quarantine: dict[str, str] = field(default_factory=dict)
    stop: dict[str, str] = field(default_factory=dict)
    rewinds: dict[str, Rewind] = field(default_factory=dict)
    supersedes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Close `incident` without a plan."""

    incident: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TripBreaker:
    """Isolate no node any more, until a person has looked."""

    reason: str


Action = Rest | Wait | Continue | Respond | Dismiss | TripBreaker
