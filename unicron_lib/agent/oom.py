"""Whether a SIGKILL came from the kernel's out-of-memory killer, as far as control groups and the kernel's log tell."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

NAMED_FOR_S = 60.0
"""How long a process id stands for the process that the kernel named: ids are used again."""
COUNTED_FOR_S, LOOK_S = 5.0, 1.0
"""How long a kill that was only counted may explain the end of a process, and how often the count is looked at."""


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
    """Tells at each SIGKILL whether the kernel did it for memory: it has named the process, or its count has just grown.

    A count that grows by n explains the next n SIGKILLs, but none that comes later than `COUNTED_FOR_S`: what the kernel
    killed may have been no rank.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._seen = oom_kills(root)
        self._counted: deque[float] = deque(maxlen=256)
        self._named: deque[tuple[int, float]] = deque(maxlen=256)

    async def run(self) -> None:
        """Look at the count each second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """See whether the count has grown; to be done each second, as it does not tell when it did."""
        now, before = oom_kills(self._root), self._seen
        if now is None:
            return
        self._seen = now
        if before is not None:
            self._counted.extend([self._clock()] * (now - before))

    def name(self, pid: int) -> None:
        """The kernel's log says that it has killed `pid` for memory."""
        self._named.append((pid, self._clock()))

    def struck(self, pid: int | None = None) -> bool:
        """Whether the process that was killed just now, `pid`, was killed for memory; False where nothing can be read."""
        self.look()
        now = self._clock()
        while self._counted and now - self._counted[0] > COUNTED_FOR_S:
            self._counted.popleft()
        counted = bool(self._counted)
        if counted:
            self._counted.popleft()
        return counted or any(who == pid and now - at <= NAMED_FOR_S for who, at in self._named)
