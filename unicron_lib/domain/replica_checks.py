"""Whether a job's model can be cut into the replicas that it asks for."""

from typing import Protocol


class Cut(Protocol):
    """What of a job decides it; the names are Megatron's."""

    @property
    def tensor_model_parallel_size(self) -> int:
        """Ranks that share each layer."""

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Stages."""

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
    parts = {"num_attention_heads": job.num_attention_heads, "vocab_size": job.vocab_size}
    uncut = [f"{key} {size}" for key, size in parts.items() if size % tp]
    limits = {"min_gpus": job.min_gpus, "max_gpus": job.max_gpus}
    uneven = [f"{key} {gpus}" for key, gpus in limits.items() if gpus is not None and gpus % (tp * pp)]
    replica = f"{tp * pp}, the GPUs of a replica with its tensor and pipeline sizes"
    return (
        (bool(uncut), f"tensor_model_parallel_size {tp} does not divide {', '.join(uncut)}"),
        (job.num_layers % pp != 0, f"pipeline_model_parallel_size {pp} does not divide num_layers {job.num_layers}"),
        (bool(uneven), f"{', '.join(uneven)} is no multiple of {replica}"),
    )
