"""Whether a job's model can be cut into the replicas that it asks for."""

from collections.abc import Sequence
from typing import Protocol

from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout


class Cut(Protocol):
    """What of a job decides it; the names are Megatron's."""

    @property
    def tensor_model_parallel_size(self) -> int:
        """Ranks that share each layer."""

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Stages."""

    @property
    def parallel_layouts(self) -> Sequence[ParallelLayout]:
        """In the place of both: the layouts among which the planner chooses."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    @property
    def num_attention_heads(self) -> int:
        """Heads of a layer."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def min_gpus(self) -> int:
        """The fewest GPUs."""

    @property
    def max_gpus(self) -> int | None:
        """The most GPUs, if there is a limit."""


def replica_checks(job: Cut) -> tuple[tuple[bool, str], ...]:
    """What is wrong if the first of a pair is true, and a sentence on it."""
    tp, pp = max(1, job.tensor_model_parallel_size), max(1, job.pipeline_model_parallel_size)
    if not job.parallel_layouts:
        told = "the GPUs of a replica with its tensor and pipeline sizes"
        return (*_model_checks(job, Layout(tp=tp, pp=pp)), _limit_check(job, [tp * pp], told))
    replicas = [it.replica for it in job.parallel_layouts]
    twice = sorted({it.shape for it in replicas if replicas.count(it) > 1})
    sizes = sorted({it.num_gpus for it in replicas})
    tables = [it for it in job.parallel_layouts if it.throughput_flops]
    return (
        (
            tp * pp > 1,
            "tensor_ and pipeline_model_parallel_size are one fixed layout, parallel_layouts several: keep one of them",
        ),
        (bool(twice), f"parallel_layouts has {', '.join(twice)} more than once"),
        (
            0 < len(tables) < len(job.parallel_layouts),
            "some of parallel_layouts have throughput_flops, others not: give it for all of them or for none",
        ),
        *(check for replica in replicas for check in _model_checks(job, replica)),
        _limit_check(job, sizes, "the GPUs of a replica in one of its parallel_layouts"),
    )


def _model_checks(job: Cut, replica: Layout) -> tuple[tuple[bool, str], ...]:
    parts = {"num_attention_heads": job.num_attention_heads, "vocab_size": job.vocab_size}
    uncut = [f"{key} {size}" for key, size in parts.items() if size % replica.tp]
    return (
        (bool(uncut), f"tensor_model_parallel_size {replica.tp} does not divide {', '.join(uncut)}"),
        (
            job.num_layers % replica.pp != 0,
            f"pipeline_model_parallel_size {replica.pp} does not divide num_layers {job.num_layers}",
        ),
    )


def _limit_check(job: Cut, sizes: Sequence[int], told: str) -> tuple[bool, str]:
    limits = {"min_gpus": job.min_gpus, "max_gpus": job.max_gpus}
    uneven = [f"{key} {gpus}" for key, gpus in limits.items() if gpus is not None and all(gpus % size for size in sizes)]
    return bool(uneven), f"{', '.join(uneven)} is no multiple of {' or '.join(map(str, sizes))}, {told}"
