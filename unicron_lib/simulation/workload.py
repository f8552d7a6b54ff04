"""What is simulated: a cluster of equal nodes, and the jobs that train on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

from unicron_lib.errors import UserError

STATE_BYTES = 14
"""Bytes a parameter that a job's state has: bf16 weight 2, float32 master weight 4, the two moments of Adam 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """A training job.

    `throughput_flops` maps each size in GPUs that it can run on to the FLOP/s of the whole job, T(t, x). `num_params` is the
    size of its model, `iteration_s` what one iteration takes, `checkpoint_s` how often it saves to the object store. It
    arrives at `arrives_s` and ends when it has done `work_flop`.
    """

    job: str
    weight: float
    throughput_flops: Mapping[int, float]
    num_params: float
    iteration_s: float = 10.0
    checkpoint_s: float = 1800.0
    arrives_s: float = 0.0
    work_flop: float = inf

    def __post_init__(self) -> None:
        if not self.throughput_flops or min(self.throughput_flops) < 1 or min(self.throughput_flops.values()) <= 0:
            raise UserError(f"job {self.job}: throughput_flops must map sizes of 1 GPU or more to FLOP/s above 0")
        figures = {"weight": self.weight, "num_params": self.num_params, "iteration_s": self.iteration_s}
        for name, value in figures.items():
            if not (isfinite(value) and value > 0):
                raise UserError(f"job {self.job}: {name} is {value}, it must be a finite number above 0")

    @property
    def min_gpus(self) -> int:
        """The smallest size on which it can run."""
        return min(self.throughput_flops)

    @property
    def max_gpus(self) -> int:
        """The largest size that it can use."""
        return max(self.throughput_flops)

    @property
    def state_bytes(self) -> float:
        """What a new place needs before it can go on."""
        return STATE_BYTES * self.num_params

    def flops(self, num_gpus: int) -> float:
        """FLOP/s on that many GPUs: those of the largest size that fits into them, 0.0 below the smallest."""
        exact = self.throughput_flops.get(num_gpus)
        if exact is not None:
            return exact
        return max((flops for size, flops in self.throughput_flops.items() if size <= num_gpus), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCluster:
    """Equal nodes.

    `mtbf_gpu_s` is what is believed of the time between failures of one GPU that cause a re-planning. `timeout_s` is
    after how long a collective gives up where nobody finds out sooner (D_timeout). `gpu_dollars_h` is the price of a GPU.
    """

    num_nodes: int
    gpus_per_node: int = 8
    mtbf_gpu_s: float = 6.2e7
    timeout_s: float = 1800.0
    gpu_dollars_h: float = 2.0

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node
