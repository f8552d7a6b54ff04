"""One life of a process: its number and when it started, since numbers come back. As told by /proc."""

from dataclasses import dataclass
from pathlib import Path

_DEAD = {"Z", "X"}
_PREFIX = b"UNICRON_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`start` is in clock ticks since the machine's boot."""

    pid: int
    start: int

    def __str__(self) -> str:
        """As `read` reads it."""
        return f"{self.pid}:{self.start}"

    @staticmethod
    def read(text: str) -> "Life | None":
        """The life that `text` names, None if it names none."""
        pid, _, start = text.strip().partition(":")
        if not (pid.isascii() and pid.isdigit() and start.isascii() and start.isdigit()):
            return None
        return Life(pid=int(pid), start=int(start))


def life_of(pid: int) -> Life | None:
    """The life of the process, None if there is no such process or it is dead and only waits to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in _DEAD else Life(pid=pid, start=int(fields[19]))


def is_alive(life: Life) -> bool:
    """Whether the process runs, and is not another one with the same number."""
    return life_of(life.pid) == life


def boot_id() -> str:
    """Names the time since the machine's last boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def marks_of(pid: int) -> dict[str, str]:
    """The names with our prefix in the environment that a process was started with; empty if nobody tells."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    if _PREFIX not in environment:
        return {}
    ours = (entry for entry in environment.split(b"\0") if entry.startswith(_PREFIX))
    return {name: value for name, _, value in (entry.decode(errors="replace").partition("=") for entry in ours)}
