"""The ways in which a job's model may be cut into replicas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from unicron_lib.domain.plans import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """One way to cut a job's model; the keys are Megatron's.

    `throughput_flops` is the job's table in this layout: GPUs to FLOP/s of the whole job; sizes that it lacks are not offered.
    Raises ValueError for a size that is not above 0.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    throughput_flops: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.tensor_model_parallel_size, self.pipeline_model_parallel_size) < 1:
            raise ValueError("tensor_model_parallel_size and pipeline_model_parallel_size must be greater than 0")

    @property
    def replica(self) -> Layout:
        """The layout of one replica."""
        return Layout(tp=self.tensor_model_parallel_size, pp=self.pipeline_model_parallel_size)

    def on(self, num_gpus: int, *, max_replicas: int | None) -> Layout | None:
        """The layout on exactly so many GPUs; None if it has none, or not a micro-batch for each of its replicas."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        dp, left = divmod(num_gpus, tp * pp)
        is_offered = not self.throughput_flops or num_gpus in self.throughput_flops
        if left or dp < 1 or not is_offered or (max_replicas is not None and dp > max_replicas):
            return None
        return Layout(tp=tp, pp=pp, dp=dp)
