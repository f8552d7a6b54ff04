"""The workloads that the Unicron paper's figures are reproduced with: 16 nodes of 8 A800, six jobs.

The paper's own six tasks are not known here, nor the limits of their sizes. These are ours: jobs are sized in whole nodes, and
the smaller a model, the fewer GPUs it can use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from unicron_lib.planning.throughput import Profile
from unicron_lib.simulation.workload import SimCluster, SimJob

NODE_GPUS = 8
CLUSTER = SimCluster(num_nodes=16, gpus_per_node=NODE_GPUS)

FITTED = ("the six jobs' sizes", "repair times of trace-a and trace-b")
"""Chosen so that the ratio to Megatron comes out near the published one, which is therefore no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model: its parameters, the achieved TFLOP/s of one GPU by number of GPUs (llm-foundry on A100), and its sizes.

    Between the published sizes a power law is followed. 70B is published from 64 GPUs on: it is taken to be as fast a GPU
    below that.
    """

    num_params: float
    tflops: Mapping[int, float]
    min_gpus: int
    max_gpus: int

    def job(self, name: str, *, weight: float = 1.0, max_gpus: int | None = None) -> SimJob:
        """A job that trains it, on whole nodes."""
        first = min(self.tflops)
        points = {size: 1e12 * size * rate for size, rate in self.tflops.items()}
        known = Profile(job=name, points={self.min_gpus: 1e12 * self.min_gpus * self.tflops[first], **points})
        sizes = range(self.min_gpus, (max_gpus or self.max_gpus) + 1, NODE_GPUS)
        table = {size: known.flops(size) for size in sizes}
        return SimJob(job=name, weight=weight, throughput_flops=table, num_params=self.num_params)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "1b": Kind(num_params=1.3e9, tflops={8: 175, 16: 173, 32: 141, 64: 172, 128: 169}, min_gpus=8, max_gpus=16),
        "7b": Kind(num_params=6.7e9, tflops={8: 158, 16: 157, 32: 160, 64: 158, 128: 156}, min_gpus=8, max_gpus=32),
        "13b": Kind(num_params=13e9, tflops={8: 137, 16: 163, 32: 164, 64: 162, 128: 162}, min_gpus=8, max_gpus=32),
        "70b": Kind(num_params=70e9, tflops={64: 111, 128: 152}, min_gpus=32, max_gpus=64),
    }
)

_MIXED = ("1b", "1b", "7b", "7b", "13b", "70b")
_RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
_CASES: Mapping[int, tuple[tuple[str, ...], tuple[float, ...]]] = MappingProxyType(
    {
        1: (("7b",) * 6, (1.0,) * 6),
        2: (("1b", "1b", "1b", "7b", "7b", "13b"), (1.0,) * 6),
        3: (("7b",) * 6, _RISING),
        4: (_MIXED, _RISING),
        5: (_MIXED, _RISING[::-1]),
    }
)
CASES = tuple(_CASES)
"""1: all alike; 2: small models, equal weights; 3: 7B of rising weight; 4 and 5: mixed, weight rising or falling with size."""


def jobs_of(case: int) -> tuple[SimJob, ...]:
    """The six jobs of one of the `CASES`; any of them could use half of the cluster."""
    kinds, weights = _CASES[case]
    most = CLUSTER.num_gpus // 2
    named = enumerate(zip(kinds, weights, strict=True), start=1)
    return tuple(KINDS[kind].job(f"gpt-{kind}-{n}", weight=weight, max_gpus=most) for n, (kind, weight) in named)


def trace_jobs() -> tuple[SimJob, ...]:
    """The six jobs of trace-a and trace-b: mixed sizes, equal weights."""
    return tuple(KINDS[kind].job(f"gpt-{kind}-{n}") for n, kind in enumerate(_MIXED, start=1))
