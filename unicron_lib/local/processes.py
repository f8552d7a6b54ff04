"""Child processes that cannot outlive us: they die with their parent, and whatever is left is found by its mark."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "UNICRON_CLUSTER_ID"
"""Environment variable that every process of a local cluster carries."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How to start one process; `arguments` follow this Python, `log` gets stdout and stderr."""

    name: str
    arguments: Sequence[str]
    log: Path


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Whether nobody listens on this port of 127.0.0.1."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(program: Program, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `program` in a session of its own; the kernel kills it when we die."""
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with program.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *program.arguments],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - we start processes from one thread
        )


def tail(path: Path, lines: int = 5) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def marked(cluster_id: str) -> list[psutil.Process]:
    """All processes that carry the mark of this cluster, ourselves excepted."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == cluster_id:
                found.append(process)
    return found


def sweep(cluster_id: str, *, grace_s: float = 0.0) -> int:
    """Kill whatever still carries the mark; how many there were."""
    left = marked(cluster_id)
    if grace_s:
        _, left = psutil.wait_procs(left, timeout=grace_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return len(left)
