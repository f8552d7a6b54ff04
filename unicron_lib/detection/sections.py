"""The sections of a rank's life, and how long a rank may be silent in each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from types import MappingProxyType

from unicron_lib.domain.jobs import JobSpec


class Section(StrEnum):
    """What a rank is doing. In `step` it works on its own part of an iteration, in `collective` it waits for the others."""

    SETUP = "setup"
    STEP = "step"
    COLLECTIVE = "collective"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    DRAINING = "draining"
    PARKED = "parked"


PACED = frozenset({Section.STEP, Section.COLLECTIVE})
"""Sections whose limit is learned; the sections that are neither here nor below are never judged."""
PAUSES = frozenset({Section.EVAL, Section.CHECKPOINT})
"""Sections between two iterations. Ranks leave them at different times, and wait for each other in the next all-reduce."""
DEFAULT_LIMITS_S: Mapping[Section, float] = MappingProxyType(
    {Section.SETUP: 600.0, Section.EVAL: 1800.0, Section.CHECKPOINT: 600.0}
)
INSIDE = 0.9
"""A limit that nobody has set is at most so much of the collectives' timeout: who waits must not give up first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a job allows its ranks, seconds: `fixed_s` by section, `step_s` in place of what would be learned.

    A paced section may last `hang_factor` times as long as usual; `step_s` counts from the second iteration on. A silence
    that is shorter than `patience_s` is told, but nothing is done about it. No limit that nobody has set is more than
    `most_s`, unless the rank's own iterations are longer.
    """

    hang_factor: float = 3.0
    patience_s: float = 5.0
    step_s: float | None = None
    most_s: float = inf
    fixed_s: Mapping[Section, float] = field(default_factory=lambda: DEFAULT_LIMITS_S)

    @classmethod
    def of(cls, spec: JobSpec) -> "Limits":
        """The limits that a job's owner has set; the defaults for the rest, inside its `distributed_timeout_minutes`."""
        most_s = INSIDE * 60.0 * spec.distributed_timeout_minutes
        own = {Section(name): limit_s for name, limit_s in spec.section_timeouts_s.items()}
        return cls(
            hang_factor=spec.hang_factor,
            patience_s=spec.hang_patience_s,
            step_s=own.pop(Section.STEP, None),
            most_s=most_s,
            fixed_s={section: min(limit_s, most_s) for section, limit_s in DEFAULT_LIMITS_S.items()} | own,
        )

    @property
    def unlearned_s(self) -> float:
        """How long a paced section may last before its pace is known: at first, much is made that is kept later."""
        return max(self.step_s or 0.0, self.fixed_s[Section.SETUP])

    @property
    def start_s(self) -> float:
        """How long a rank may take to its first iteration's end without being told to stand still."""
        return self.fixed_s[Section.SETUP] + self.unlearned_s + self.patience_s
