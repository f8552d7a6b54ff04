"""A watcher whose looks come late has missed something: how much of a silence that excuses. Pure: time is an argument."""

from collections import deque

MOST_EXCUSED = 3
WITHIN_S = 60.0
"""So many late looks within so long are accidents. A watcher that is always late has to judge all the same."""


class Lateness:
    """The looks of a watcher that has one every `usual_s` and has missed something after more than `late_s` without."""

    def __init__(self, *, usual_s: float, late_s: float) -> None:
        self._usual_s = usual_s
        self._late_s = late_s
        self._looked_at: float | None = None
        self._late: deque[float] = deque(maxlen=MOST_EXCUSED + 1)

    def look(self, now: float) -> float | None:
        """How much later than usual the look at `now` (monotonic, seconds) comes, 0 if not late; None: late once too often."""
        gap_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if gap_s <= self._late_s:
            return 0.0
        self._late.append(now)
        return None if self.is_chronic(now) else gap_s - self._usual_s

    def is_chronic(self, now: float) -> bool:
        """Whether more looks than can be excused were late lately."""
        return len(self._late) > MOST_EXCUSED and now - self._late[0] <= WITHIN_S
