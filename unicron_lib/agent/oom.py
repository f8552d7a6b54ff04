"""Whether a SIGKILL came from the kernel's out-of-memory killer, as far as control groups tell."""

from pathlib import Path


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
    """Tells at each SIGKILL whether the kernel has killed for memory since the last question."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = oom_kills(root)

    def struck(self) -> bool:
        """Whether the count has grown; False where it cannot be read."""
        now, before = oom_kills(self._root), self._seen
        self._seen = now
        return now is not None and now > (before or 0)
