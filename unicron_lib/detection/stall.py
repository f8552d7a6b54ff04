"""Has a job stopped making iterations? A robust baseline of its own pace, learned anew by every generation."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

HANG_FACTOR = 3.0
"""A failure when an iteration takes more than three times the usual (paper, section 4)."""
FLOOR_S = 10.0
WARM_UP = 5


@dataclass(slots=True)
class Pace:
    """Recent durations of a job's iterations, in seconds, and when the newest one ended (the observer's clock)."""

    generation: int = -1
    iteration: int = -1
    seen_at: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def observe(self, generation: int, iteration: int, iteration_s: float, now: float) -> None:
        """Take in the newest iteration; a new generation begins a new baseline."""
        if generation != self.generation:
            self.generation, self.iteration, self.seen_at = generation, -1, now
            self.durations.clear()
        if iteration > self.iteration:
            self.iteration, self.seen_at = iteration, now
            self.durations.append(iteration_s)

    def stalled_for(self, now: float) -> float | None:
        """Seconds since the last iteration if that is a hang, None if it is not or nothing is known yet."""
        if len(self.durations) < WARM_UP:
            return None
        silent_s = now - self.seen_at
        return silent_s if silent_s > max(HANG_FACTOR * median(self.durations), FLOOR_S) else None
