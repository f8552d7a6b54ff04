"""Whether a job's newest checkpoint is too old: the store may fail for hours, and training goes on regardless."""

from dataclasses import dataclass
from enum import IntEnum

LATE, OVERDUE = 3.0, 10.0
"""So many times what lies between two checkpoints by their cadence."""
LATE_S, OVERDUE_S = 60.0, 300.0
"""And no sooner than this: where iterations take milliseconds, a busy machine delays more than that."""


class Level(IntEnum):
    """How bad it is."""

    FRESH = 0
    LATE = 1
    OVERDUE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """What a restart would cost by now, and the sentence about it."""

    level: Level
    age_s: float
    told: str


def judge(job: str, *, age_s: float, usual_s: float) -> Freshness:
    """Judge the age of the newest checkpoint, or of the run where there is none, by the time between two of them."""
    level = Level.FRESH
    if age_s > max(OVERDUE_S, OVERDUE * usual_s):
        level = Level.OVERDUE
    elif age_s > max(LATE_S, LATE * usual_s):
        level = Level.LATE
    wanted = f"there should be one every {usual_s:.0f} s"
    advice = "" if level == Level.FRESH else f": {wanted}, see whether the store answers (`unicron checkpoints {job}`)"
    return Freshness(level=level, age_s=age_s, told=f"the newest checkpoint of {job} is {age_s:.0f} s old{advice}")
