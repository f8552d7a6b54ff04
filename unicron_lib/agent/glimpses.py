"""What the kernel tells of a process and its descendants: whether they sleep, and how much processor time they have used."""

import os
from pathlib import Path

from unicron_lib.detection.stillness import Glimpse

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ASLEEP = frozenset("STtZXI")
"""States of a thread that sleeps, is stopped or has ended; otherwise it runs, waits for a processor (`R`) or a disk (`D`)."""
STATE, USER, SYSTEM, REAPED_USER, REAPED_SYSTEM = 0, 11, 12, 13, 14
"""Places of the fields of `/proc/PID/stat` behind the name."""


def glimpse(pid: int) -> Glimpse | None:
    """A look at process `pid`; None if it, or one of its threads, ends meanwhile or is hidden."""
    is_asleep, ticks, left = True, 0, [pid]
    try:
        while left:
            process = Path(f"/proc/{left.pop()}")
            fields = _stat(process)
            ticks += sum(int(fields[place]) for place in (USER, SYSTEM, REAPED_USER, REAPED_SYSTEM))
            for thread in (process / "task").iterdir():
                is_asleep = is_asleep and _stat(thread)[STATE] in ASLEEP
                left += map(int, (thread / "children").read_text().split())
    except OSError:
        return None
    return Glimpse(is_asleep=is_asleep, cpu_s=ticks / TICKS_PER_S)


def _stat(path: Path) -> list[str]:
    """The name before the fields may hold anything."""
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
