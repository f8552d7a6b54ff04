"""Which parallel layouts a GPT model can have on a number of GPUs: divisibility and memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from unicron_lib.domain.plans import Layout
from unicron_lib.errors import UserError

STATE_BYTES = 18
"""Bytes a parameter: bf16 weight 2, float32 gradient 4, master weight 4, the two moments of Adam 8."""

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Samples of one pass that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT model and its batch; the keys are Megatron's.

    `recompute` trades a second forward pass for activation memory, `virtual_stages` is how many pieces of the model a
    pipeline stage interleaves at most.
    Raises UserError for values that do not fit together.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    global_batch_size: int
    recompute: bool = True
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        sizes = (key for key in self.__slots__ if key != "recompute")
        for key in sizes:
            if getattr(self, key) < 1:
                raise UserError(f"{key} is {getattr(self, key)}, it must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def passes(self) -> int:
        """Passes through the layers, each as costly as a forward one: forward, backward (two), recomputation."""
        return 4 if self.recompute else 3

    @property
    def layer_params(self) -> int:
        """Parameters of one transformer layer."""
        return 12 * self.hidden_size**2 + 13 * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, which the logits share, and of the positions."""
        return (self.vocab_size + self.seq_length) * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.num_layers * self.layer_params + self.embedding_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU and its connections. All sizes in bytes, bandwidths in bytes a second, in one direction and per GPU.

    `memory_bytes` is what training may use. `efficiency` is the share of `peak_flops` that large matrix products reach.
    `attention_bytes` is the memory traffic of an element of the attention matrix in one pass; fused kernels have little.
    """

    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    efficiency: float = 0.675
    attention_bytes: float = 14.0

    def __post_init__(self) -> None:
        for key in self.__slots__:
            value = getattr(self, key)
            if not (isfinite(value) and value > 0):
                raise UserError(f"{key} of the GPU is {value}, it must be a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its micro-batch (samples of one pass)."""

    layout: Layout
    micro_batch: int

    def num_micro_batches(self, model: Model) -> int:
        """Micro-batches of one iteration of the slowest replica."""
        return -(-model.global_batch_size // (self.micro_batch * self.layout.dp))


def candidates(model: Model, *, at_most: int, gpus_per_node: int) -> Iterator[Candidate]:
    """Every layout on up to `at_most` GPUs that divides the model, with each micro-batch that divides the batch.

    Tensor parallelism stays within a node and divides the heads, pipeline stages hold equally many layers, and every
    replica has the same number of micro-batches. Most numbers of GPUs have few layouts, some none at all.
    """
    for tp in _divisors(model.num_attention_heads, at_most=min(gpus_per_node, at_most)):
        for pp in _divisors(model.num_layers, at_most=at_most // tp):
            for dp in _divisors(model.global_batch_size, at_most=at_most // (tp * pp)):
                share = model.global_batch_size // dp
                for micro_batch in MICRO_BATCHES:
                    if share % micro_batch == 0:
                        yield Candidate(layout=Layout(tp=tp, pp=pp, dp=dp), micro_batch=micro_batch)


def memory_bytes(model: Model, candidate: Candidate) -> float:
    """Memory of the fullest GPU: parameters with their state, kept activations, one layer at work, and the logits.

    With recomputation a layer keeps its input (2 bytes an element) for each micro-batch in flight, and one layer at a time
    holds all of its own; without, all layers hold theirs (34 bytes an element, Korthikanti et al. 2022, equation 4,
    without the attention matrix, which fused kernels never store).
    """
    tp, pp = candidate.layout.tp, candidate.layout.pp
    activation = candidate.micro_batch * model.seq_length * model.hidden_size
    layers = model.num_layers // pp
    state = STATE_BYTES * (layers * model.layer_params + model.embedding_params) / tp
    in_flight = min(pp, candidate.num_micro_batches(model))
    kept = (2 if model.recompute else 34) * activation * layers * in_flight / tp
    at_work = activation * (10 + 24 / tp)
    # float32 logits with their gradient; in a pipeline the last stage has them, which holds fewest activations
    logits = 8 * candidate.micro_batch * model.seq_length * model.vocab_size / tp if pp == 1 else 0
    return state + kept + at_work + logits


def fitting(model: Model, device: Device, *, at_most: int) -> Iterator[Candidate]:
    """The layouts on up to `at_most` GPUs that fit into the device's memory."""
    for candidate in candidates(model, at_most=at_most, gpus_per_node=device.gpus_per_node):
        if memory_bytes(model, candidate) <= device.memory_bytes:
            yield candidate


def min_gpus(model: Model, device: Device, *, at_most: int, granularity_gpus: int = 1) -> int | None:
    """x_min: the smallest multiple of `granularity_gpus`, up to `at_most`, on which the model fits; None if none does."""
    sizes = {candidate.layout.num_gpus for candidate in fitting(model, device, at_most=at_most)}
    return min((size for size in sizes if size % granularity_gpus == 0), default=None)


def _divisors(number: int, *, at_most: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)
