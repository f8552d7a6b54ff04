"""What an agent has started, in a file that outlives it: the agent in the first line, then one process a line."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unicron_lib.agent.lives import Life, boot_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An agent and what it has started, in the present boot of the machine."""

    agent: Life
    started: tuple[Life, ...]


class Register:
    """The register that an agent writes."""

    def __init__(self, path: Path, *, node: str, agent: Life) -> None:
        self._path = path
        self._head = json.dumps({"node": node, "boot": boot_id(), "agent": str(agent)})

    def add(self, life: Life) -> None:
        """Note a process. A file that cannot be written costs a warning: the processes have their marks, too."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{life}\n" if file.tell() else f"{self._head}\n{life}\n")
        except OSError as error:
            log.warning("cannot note process %d in %s: %s", life.pid, self._path, error.strerror)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def read_register(path: Path, *, node: str) -> Registered | None:
    """What a register says, None if it is not one of `node`. Processes of an earlier boot are gone and not told."""
    head, *lines = path.read_text(errors="replace").splitlines() or [""]
    try:
        told = json.loads(head)
        agent = Life.read(told["agent"])
        is_present = told["boot"] == boot_id()
        if told["node"] != node or agent is None:
            return None
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    started = _lives(lines) if is_present else ()
    return Registered(agent=agent if is_present else Life(pid=0, start=0), started=tuple(started))


def _lives(lines: Iterable[str]) -> Iterable[Life]:
    """A line that was being written at the agent's end tells nothing."""
    return (life for line in lines if (life := Life.read(line)))
