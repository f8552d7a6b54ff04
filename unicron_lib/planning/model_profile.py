"""How fast a GPT model trains on x GPUs, from first principles: compute, communication, pipeline bubble.

The constants are fitted to the published figures of Megatron-LM on A100 and of Megatron-Core on H100; a test holds them
to 10%. Measurements of the job itself go before (`calibration`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from unicron_lib.domain.plans import Layout
from unicron_lib.planning.layouts import Candidate, Device, Model, fitting

A100 = Device(peak_flops=312e12, memory_bytes=70e9, memory_bandwidth=2.0e12, node_bandwidth=250e9, network_bandwidth=22.5e9)
"""A100 80 GB (and A800, whose compute is the same), eight a node, eight 200 Gbit/s adapters."""

H100 = Device(
    peak_flops=989e12,
    memory_bytes=70e9,
    memory_bandwidth=3.35e12,
    node_bandwidth=400e9,
    network_bandwidth=38e9,
    efficiency=0.745,
    attention_bytes=3.6,
)
"""H100 80 GB, eight a node, eight 400 Gbit/s adapters; fused attention."""

H200 = replace(H100, memory_bytes=130e9, memory_bandwidth=4.8e12)
"""As H100, with the memory of NVIDIA's data sheet: 141 GB at 4.8 TB/s."""

CPU = Device(peak_flops=1e11, memory_bytes=16e9, memory_bandwidth=2e10, node_bandwidth=2e9, network_bandwidth=1e9)
"""A few processor cores and gloo, for ranks without a GPU."""

BY_NAME: Mapping[str, Device] = MappingProxyType({"A100": A100, "A800": A100, "H100": H100, "H800": H100, "H200": H200})
"""By the word in the driver's name for a GPU."""

ELEMENTWISE_BYTES = 45.0
"""Memory traffic of the operations between the matrix products, in bytes per token, hidden unit and pass."""

EXPOSED = 0.33
"""Share of the data-parallel all-reduce that is not hidden behind the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """What the model says of one layout: `flops` are useful FLOP/s of the whole job, `hardware_flops` with recomputation."""

    layout: Layout
    micro_batch: int
    iteration_s: float
    flops: float
    hardware_flops: float


def iteration_flops(model: Model, *, passes: int = 3) -> float:
    """FLOP of one iteration by Megatron's formula (Narayanan et al. 2021, equation 3).

    Three `passes` are forward and backward, the useful work; a fourth recomputes the activations (their 96).
    """
    tokens = model.global_batch_size * model.seq_length
    hidden, layers = model.hidden_size, model.num_layers
    attention, logits = model.seq_length / (6 * hidden), model.vocab_size / (12 * layers * hidden)
    if passes == 4:
        logits = model.vocab_size / (16 * layers * hidden)
    return 24.0 * passes * tokens * layers * hidden**2 * (1 + attention + logits)


def iteration_s(model: Model, device: Device, candidate: Candidate) -> float:
    """Seconds of one iteration: micro-batches through the pipeline, then the gradients' all-reduce."""
    layout = candidate.layout
    num_micro_batches = candidate.num_micro_batches(model)
    stage_s = _stage_s(model, device, candidate)
    pieces = min(model.virtual_stages, model.num_layers // layout.pp)
    bubble = (layout.pp - 1) / pieces
    return (num_micro_batches + bubble) * stage_s + _gradients_s(model, device, layout)


def modelled(model: Model, device: Device, candidate: Candidate) -> Modelled:
    """Time and FLOP/s of one layout."""
    seconds = iteration_s(model, device, candidate)
    return Modelled(
        layout=candidate.layout,
        micro_batch=candidate.micro_batch,
        iteration_s=seconds,
        flops=iteration_flops(model) / seconds,
        hardware_flops=iteration_flops(model, passes=model.passes) / seconds,
    )


def model_flops(model: Model, device: Device, candidate: Candidate) -> float:
    """Useful FLOP/s of the whole job in one layout."""
    return iteration_flops(model) / iteration_s(model, device, candidate)


@lru_cache(maxsize=512)
def best_layouts(model: Model, device: Device, *, at_most: int) -> Mapping[int, Modelled]:
    """The fastest layout that fits, for each number of GPUs up to `at_most` that has one.

    Of equally fast ones the one with the least tensor, then pipeline parallelism.
    """
    found: dict[int, Modelled] = {}
    for candidate in fitting(model, device, at_most=at_most):
        layout, new = candidate.layout, modelled(model, device, candidate)
        old = found.get(layout.num_gpus)
        if old is None or _order(new) < _order(old):
            found[layout.num_gpus] = new
    return MappingProxyType(found)


def _order(found: Modelled) -> tuple[float, int, int, int]:
    return found.iteration_s, found.layout.tp, found.layout.pp, found.micro_batch


def _stage_s(model: Model, device: Device, candidate: Candidate) -> float:
    """Seconds of one micro-batch in the slowest pipeline stage: the last one, which has the logits too."""
    tp, pp = candidate.layout.tp, candidate.layout.pp
    tokens = candidate.micro_batch * model.seq_length
    activation = tokens * model.hidden_size
    hidden, seq = model.hidden_size, model.seq_length
    flops = model.passes * model.num_layers / pp * 24 * tokens * hidden**2 * (1 + seq / (6 * hidden))
    logits_flops = 6 * activation * model.vocab_size
    compute_s = (flops + logits_flops) / tp / (device.peak_flops * device.efficiency)
    layer_passes = model.passes * model.num_layers / pp
    traffic = ELEMENTWISE_BYTES * activation * (0.4 + 0.6 / tp)
    traffic += device.attention_bytes * tokens * seq * model.num_attention_heads / tp
    # two all-reduces of 2 bytes an element and pass: after the attention and after the MLP
    tensor_s = 2 * _all_reduce_s(2 * activation, tp, device.node_bandwidth)
    # sent on to the next stage, forth and back; each GPU of the tensor-parallel group sends its part
    pieces = min(model.virtual_stages, model.num_layers // pp)
    hops_s = pieces * 2 * 2 * activation / tp / device.network_bandwidth if pp > 1 else 0.0
    return compute_s + layer_passes * (traffic / device.memory_bandwidth + tensor_s) + hops_s


def _gradients_s(model: Model, device: Device, layout: Layout) -> float:
    """Seconds of the all-reduce of the float32 gradients of the fullest stage that stay visible."""
    params = (model.num_layers / layout.pp * model.layer_params + model.embedding_params) / layout.tp
    inside = layout.num_gpus <= device.gpus_per_node
    bandwidth = device.node_bandwidth if inside else device.network_bandwidth
    return EXPOSED * _all_reduce_s(4 * params, layout.dp, bandwidth)


def _all_reduce_s(num_bytes: float, num_ranks: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / bandwidth
