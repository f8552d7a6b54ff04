"""What the agents of a local cluster and everything that they have started hold on to: to find what leaks."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from unicron_lib.local.processes import marked

AGENT = "unicron_lib.agent"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only listed
SAMPLES, PAUSE_S = 20, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Counts over all agents with their probes, fork servers and ranks; `shared` are the machine's files of shared memory."""

    processes: int
    threads: int
    descriptors: int
    sockets: int
    listening: int
    shared: int

    def grown_since(self, earlier: "Census") -> dict[str, tuple[int, int]]:
        """What there is more of now: before and now, by name."""
        pairs = {field.name: (getattr(earlier, field.name), getattr(self, field.name)) for field in fields(self)}
        return {name: (before, now) for name, (before, now) in pairs.items() if now > before}


def quietest(samples: Iterable[Census]) -> Census:
    """The least of each count: a save or a command under way holds more for a moment, and that is no leak."""
    taken = list(samples)
    return Census(**{field.name: min(getattr(it, field.name) for it in taken) for field in fields(Census)})


def census(cluster_id: str, *, samples: int = SAMPLES) -> Census:
    """Count some times, and take the least; the cluster should be at rest, with its jobs training."""

    def count() -> Iterable[Census]:
        for _ in range(samples):
            yield _count(cluster_id)
            time.sleep(PAUSE_S)

    return quietest(count())


def _count(cluster_id: str) -> Census:
    threads, descriptors, sockets, listening, alive = 0, 0, 0, 0, 0
    for process in _of_agents(cluster_id):
        with suppress(psutil.Error, OSError):
            links = _links(process.pid)
            connections = process.net_connections()
            threads += process.num_threads()
            descriptors += len(links)
            sockets += sum(link.startswith("socket:") for link in links)
            listening += sum(connection.status == psutil.CONN_LISTEN for connection in connections)
            alive += 1
    shared = len(list(SHARED_MEMORY.iterdir())) if SHARED_MEMORY.is_dir() else 0
    return Census(
        processes=alive, threads=threads, descriptors=descriptors, sockets=sockets, listening=listening, shared=shared
    )


def _of_agents(cluster_id: str) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for process in marked(cluster_id):
        with suppress(psutil.Error):
            if AGENT in process.cmdline():
                found |= {process, *process.children(recursive=True)}
    return found


def _links(pid: int) -> list[str]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    return links
