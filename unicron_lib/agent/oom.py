"""Whether a SIGKILL came from the kernel's out-of-memory killer, as far as control groups and the kernel's log tell."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

NAMED_FOR_S = 60.0
"""How long a process id stands for the process that the kernel named: ids are used again."""


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes of this control group that the kernel has killed for memory so far; None where nothing can be read."""
    for path in _counters(root):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts:
            return int(counts[0])
    return None


def _counters(root: Path) -> list[Path]:
    """The files that may hold the count: of version 2 and of version 1, also as seen from inside a container."""
    base = root / "sys/fs/cgroup"
    found = []
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        entries = []
    for entry in entries:
        number, controllers, path = entry.split(":", 2)
        if number == "0":
            found.append(base / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(base / "memory" / path.lstrip("/") / "memory.oom_control")
    return [*found, base / "memory.events", base / "memory/memory.oom_control"]


class OomWatch:
    """Tells at each SIGKILL whether the kernel did it for memory: it has named the process, or its count has grown.

    A count that has grown by n explains the next n SIGKILLs.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._seen = oom_kills(root)
        self._unexplained = 0
        self._named: deque[tuple[int, float]] = deque(maxlen=256)

    def name(self, pid: int) -> None:
        """The kernel's log says that it has killed `pid` for memory."""
        self._named.append((pid, self._clock()))

    def struck(self, pid: int | None = None) -> bool:
        """Whether the process that was killed just now, `pid`, was killed for memory; False where nothing can be read."""
        now, before = oom_kills(self._root), self._seen
        self._seen = now
        if now is not None:
            self._unexplained += max(0, now - (before or 0))
        named = any(who == pid and self._clock() - at <= NAMED_FOR_S for who, at in self._named)
        counted = self._unexplained > 0
        self._unexplained -= counted
        return named or counted
