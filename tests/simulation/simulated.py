"""A small cluster with three jobs, traces written by hand, and a policy that never moves a job."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.policy import Answer, Change, Event, FaultStruck, NodeBack
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

CLUSTER = SimCluster(num_nodes=4, gpus_per_node=8, mtbf_gpu_s=3e7)
SIZES = (8, 16, 24)


def job(name: str, *, weight: float = 1.0, sizes: Sequence[int] = SIZES, **keys: float) -> SimJob:
    table = {size: 1e12 * size for size in sizes}
    return SimJob(job=name, weight=weight, throughput_flops=table, num_params=1e9, **keys)


JOBS = (job("a", weight=2.0), job("b", sizes=(8,)))
"""On 32 GPUs they get 24 and 8: nothing is idle."""


def fault(at_s: float, kind: ErrorKind, node: int = 0, *, repair_s: float = 0.0, rank_share: float = 0.0) -> Fault:
    return Fault(at_s=at_s, kind=kind, node=node, repair_s=repair_s, rank_share=rank_share)


def trace(*faults: Fault, duration_s: float = 10_000.0) -> Trace:
    return Trace(name="by hand", source="a test", duration_s=duration_s, faults=faults)


@dataclass(frozen=True)
class Fixed:
    """Job number i has node i, and stands still for 100 s after any fault there, or until the node is back."""

    name: str = "fixed"
    fitted: tuple[str, ...] = ()

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "FixedRun":
        return FixedRun(jobs)


class FixedRun:
    def __init__(self, jobs: Sequence[SimJob]) -> None:
        self.jobs = jobs

    def begin(self) -> Answer:
        return [self.trains(node, 0.0) for node in range(len(self.jobs))]

    def trains(self, node: int, at_s: float) -> Change:
        return Change(job=self.jobs[node].job, gpus=8, from_s=at_s, flops=8e12)

    def on(self, event: Event, now_s: float) -> Iterator[Change]:
        match event:
            case FaultStruck(fault=struck) if struck.node < len(self.jobs):
                gpus = 0 if struck.takes_node else 8
                use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
                name = self.jobs[struck.node].job
                yield Change(job=name, gpus=gpus, from_s=now_s, flops=0.0, use=use, cause=event.cause)
                if not struck.takes_node:
                    yield self.trains(struck.node, now_s + 100.0)
            case NodeBack(node=node) if node < len(self.jobs):
                yield self.trains(node, now_s)
