"""How much host memory slots may take: pure but for `room_of` and what is promised."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEFT_FREE = 0.1
"""Of all memory: a training that is killed for memory is worse than one without slots."""
MOST = 0.5
"""Of all memory, for the slots of all jobs of a node."""

ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A node's memory, in bytes: all of it, what is available, what the file system of the slots has left, what slots hold."""

    total: int
    available: int
    left: int
    held: int


def shortage(wanted: int, room: Room) -> str:
    """Why slots must not take so many more bytes, one sentence; empty if they may."""
    most = min(room.left, int(room.available - LEFT_FREE * room.total), int(MOST * room.total) - room.held)
    if wanted <= most:
        return ""
    return (
        f"{wanted / 1e6:.0f} MB are wanted and {max(0, most) / 1e6:.0f} MB may be taken ({room.left / 1e6:.0f} MB are left in "
        f"their file system, {room.available / 1e6:.0f} MB of memory are available, slots hold {room.held / 1e6:.0f} MB): "
        "enlarge it, or set `memory_interval: 0`"
    )


class Promises:
    """Memory that files of this process have been promised, and have not taken yet: by their descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}

    def make(self, descriptor: int, size: int, room: Callable[[], Room]) -> str:
        """Promise a file what it needs to become so large; or why not, one sentence. Raises OSError."""
        with self._lock:
            more = _missing(descriptor, size)
            reason = shortage(more + sum(_missing(*it) for it in self._sizes.items()), room()) if more else ""
            if not reason:
                self._sizes[descriptor] = size
            return reason

    def keep(self, descriptor: int) -> None:
        """The file has what it will have, before it is closed."""
        with self._lock:
            self._sizes.pop(descriptor, None)


PROMISES = Promises()


def _missing(descriptor: int, size: int) -> int:
    return max(0, size - os.fstat(descriptor).st_blocks * 512)


def room_of(directory: Path, root: Path = Path("/")) -> Room:
    """Of the node, or of the container, as it is now, for a job's `directory` of slots beside those of other jobs.

    `root` is where /proc and /sys are. Raises OSError.
    """
    there = os.statvfs(directory)
    told = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    limit, used = _container(root)
    total, available = _bytes(told["MemTotal"]), _bytes(told["MemAvailable"])
    return Room(
        total=min(total, limit),
        available=min(available, limit - used),
        left=there.f_bavail * there.f_frsize,
        held=sum(path.stat().st_blocks * 512 for path in directory.parent.glob("*/*.slot")),
    )


def _container(root: Path) -> tuple[int, int]:
    """What this process's control group may take, and what it has taken; endless, and nothing, if there is no limit."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
        group = next(line for line in entries if line.startswith("0::")).removeprefix("0::").strip("/")
        folder = root / "sys/fs/cgroup" / group
        return int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
    except (OSError, ValueError, StopIteration):  # `max`, or no control groups of the second version
        return ENDLESS, 0


def _bytes(told: str) -> int:
    return 1024 * int(told.split(maxsplit=1)[0])
