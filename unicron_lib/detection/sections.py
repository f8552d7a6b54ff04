"""The sections of a rank's life, and how long a rank may be silent in each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
DEFAULT_LIMITS_S: Mapping[Section, float] = MappingProxyType(
    {Section.SETUP: 600.0, Section.EVAL: 1800.0, Section.CHECKPOINT: 600.0}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a job allows its ranks, seconds: `fixed_s` by section, `step_s` in place of what would be learned.

    A paced section may last `hang_factor` times as long as usual. A silence that is shorter than `patience_s` is told, but
    nothing is done about it.
    """

    hang_factor: float = 3.0
    patience_s: float = 5.0
    step_s: float | None = None
    fixed_s: Mapping[Section, float] = field(default_factory=lambda: DEFAULT_LIMITS_S)

    @classmethod
    def of(cls, spec: JobSpec) -> "Limits":
        """The limits that a job's owner has set; the defaults for the rest."""
        own = {Section(name): limit_s for name, limit_s in spec.section_timeouts_s.items()}
        return cls(
            hang_factor=spec.hang_factor,
            patience_s=spec.hang_patience_s,
            step_s=own.pop(Section.STEP, None),
            fixed_s={**DEFAULT_LIMITS_S, **own},
        )
