"""Which job sits on which GPUs of which node, for policies that leave every job where it is."""

from dataclasses import dataclass, field
from typing import TypeVar

from unicron_lib.simulation.workload import SimCluster

Key = TypeVar("Key")


@dataclass(slots=True)
class Seats:
    """Counts of GPUs by job and node; `free` has those of nobody on healthy nodes, without zeros.

    `num_free` and `totals`, by job, are their sums.
    """

    gpus_per_node: int
    free: dict[int, int]
    held: dict[str, dict[int, int]] = field(default_factory=dict)
    jobs: dict[int, dict[str, int]] = field(default_factory=dict)
    num_free: int = 0
    totals: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: SimCluster) -> "Seats":
        """All nodes healthy and free."""
        free = dict.fromkeys(range(cluster.num_nodes), cluster.gpus_per_node)
        return cls(gpus_per_node=cluster.gpus_per_node, free=free, num_free=cluster.num_gpus)

    def num_held(self, job: str) -> int:
        """Healthy GPUs of a job."""
        return self.totals.get(job, 0)

    def sitting(self, node: int, rank_share: float) -> str | None:
        """The job on that GPU of the node; the jobs of a node sit in the order of their names, then come the free ones."""
        place = rank_share * self.gpus_per_node
        for job, gpus in sorted(self.jobs.get(node, {}).items()):
            if place < gpus:
                return job
            place -= gpus
        return None

    def take(self, job: str, num_gpus: int) -> int:
        """Seat `job` on up to `num_gpus` free GPUs, whole nodes first; how many it got."""
        left = num_gpus
        whole = (node for node, gpus in self.free.items() if gpus == self.gpus_per_node)
        fitting = [node for node, _ in zip(whole, range(left // self.gpus_per_node), strict=False)]
        for node in fitting:
            left -= self.take_at(job, node, self.gpus_per_node)
        # what is left goes where least stays free, or at least where most is
        while left and self.free:
            enough = [node for node, gpus in self.free.items() if gpus >= left]
            node = min(enough, key=self._by_free) if enough else max(self.free, key=self._by_free)
            left -= self.take_at(job, node, left)
        return num_gpus - left

    def take_at(self, job: str, node: int, num_gpus: int) -> int:
        """Seat `job` on up to `num_gpus` free GPUs of one node; how many it got."""
        got = min(num_gpus, self.free.get(node, 0))
        if got:
            self._move(job, node, got)
        return got

    def give(self, job: str, num_gpus: int) -> None:
        """Free `num_gpus` GPUs of `job`, those of the nodes where it has least first."""
        left = num_gpus
        for node, gpus in sorted(self.held.get(job, {}).items(), key=lambda item: (item[1], item[0])):
            leaving = min(gpus, left)
            if not leaving:
                break
            left -= leaving
            self._move(job, node, -leaving)

    def lose(self, node: int) -> dict[str, int]:
        """The node is away; the GPUs that each job had there."""
        self.num_free -= self.free.pop(node, 0)
        lost = self.jobs.pop(node, {})
        for job, gpus in lost.items():
            del self.held[job][node]
            self.totals[job] -= gpus
        return lost

    def back(self, node: int) -> None:
        """The node is healthy and free."""
        self.free[node] = self.gpus_per_node
        self.num_free += self.gpus_per_node

    def _move(self, job: str, node: int, gpus: int) -> None:
        """From the free ones to the job, or back if `gpus` is negative."""
        self.num_free -= gpus
        _put_in(self.totals, job, gpus)
        _put_in(self.free, node, -gpus)
        _put_in(self.held.setdefault(job, {}), node, gpus)
        _put_in(self.jobs.setdefault(node, {}), job, gpus)

    def _by_free(self, node: int) -> int:
        return self.free[node]


def _put_in(counts: dict[Key, int], key: Key, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]
