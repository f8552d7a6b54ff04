"""Whether a job's limits of silence fit together."""

from collections.abc import Mapping
from math import isfinite
from typing import Protocol

SECTIONS = ("setup", "step", "eval", "checkpoint")
"""Sections of training whose longest silence a job's owner may set."""


class Patience(Protocol):
    """What of a job decides it."""

    @property
    def section_timeouts_s(self) -> Mapping[str, float]:
        """The longest silence by section, in seconds."""

    @property
    def hang_factor(self) -> float:
        """What is a hang, in usual iterations."""

    @property
    def hang_patience_s(self) -> float:
        """Seconds from when a hang is told until it is acted on."""

    @property
    def distributed_timeout_minutes(self) -> float:
        """After that a collective gives up by itself."""


def timeout_checks(job: Patience) -> tuple[tuple[bool, str], ...]:
    """What is wrong if the first of a pair is true, and a sentence on it.

    An outer limit that ends first would cut off what an inner one is going to heal.
    """
    collective_s = 60.0 * job.distributed_timeout_minutes
    unknown = sorted(set(job.section_timeouts_s) - set(SECTIONS))
    wrong = sorted(key for key, limit_s in job.section_timeouts_s.items() if not (isfinite(limit_s) and limit_s > 0))
    too_long = [f"{key}, {limit_s:g} s" for key, limit_s in job.section_timeouts_s.items() if limit_s >= collective_s]
    rule = (
        f"must be less than distributed_timeout_minutes, {job.distributed_timeout_minutes:g} minutes: "
        "else who waits for that rank gives up before it is found to hang"
    )
    return (
        (not job.hang_factor > 1, f"hang_factor is {job.hang_factor:g}, it must be greater than 1"),
        (job.hang_patience_s < 0, "hang_patience_s must not be negative"),
        (bool(unknown), f"section_timeouts_s has {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}"),
        (bool(wrong), f"section_timeouts_s of {', '.join(wrong)} must be a finite number greater than 0"),
        (bool(too_long), f"section_timeouts_s of {', '.join(too_long)}, {rule}"),
        (job.hang_patience_s >= collective_s, f"hang_patience_s, {job.hang_patience_s:g} s, {rule}"),
    )
