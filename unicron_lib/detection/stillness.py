"""For how long has a process verifiably done nothing? By what the kernel tells of it, look by look. Pure: time is an argument.

Silence alone may be a long iteration. A process that is silent and also asleep, without using a processor, is not in one.
That it works is no proof of health: what spins in a loop, or waits for the network by spinning, looks busy too.
"""

from dataclasses import dataclass

IDLE_SHARE = 0.05
"""Of a processor: threads beside the main one wake up now and then, also in a process that stands still."""
TICKS_S = 0.02
"""Two of the kernel's clock ticks, by which it counts processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """A process and its descendants at one moment: `cpu_s` is the processor time that they have used so far.

    `is_asleep` if all their threads sleep or are stopped: none runs, waits for a processor, or for a disk.
    """

    is_asleep: bool
    cpu_s: float


class Stillness:
    """The looks at one process since it was first doubted."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._cpu_s = 0.0

    @property
    def since(self) -> float | None:
        """Since when nothing has been done, monotonic seconds; None: something is being done, or nobody knows."""
        return self._since

    def look(self, glimpse: Glimpse | None, now: float) -> None:
        """Take in what was seen at `now` (monotonic, seconds); None if nothing could be seen."""
        if glimpse is None or not glimpse.is_asleep:
            self._since = None
        elif self._since is None or self._has_worked(glimpse, now - self._since):
            self._since, self._cpu_s = now, glimpse.cpu_s

    def _has_worked(self, glimpse: Glimpse, elapsed_s: float) -> bool:
        """Fewer seconds than before: one of the descendants has ended."""
        used_s = glimpse.cpu_s - self._cpu_s
        return used_s < 0.0 or used_s > TICKS_S + IDLE_SHARE * elapsed_s
