"""Jobs of a scenario that name the layouts in which they may run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.layout_choice import Choice, Layouts
from unicron_lib.planning.layouts import MICRO_BATCHES, Candidate, Device, Model, memory_bytes
from unicron_lib.planning.model_profile import model_flops


def choice(
    named: Sequence[ParallelLayout], table: Mapping[int, float], *, model: Model | None = None, device: Device | None = None
) -> Choice:
    """T(t, x) and the layout on x GPUs among the `named` ones.

    They may have tables of their own. Else a `model` on its `device` is reckoned through, and `table` is what was measured, in
    the layout that the model prefers; without a model it is the table of whichever layout has the most replicas.
    """
    own = {layout: flops for it in named for size, flops in it.throughput_flops.items() if (layout := _on(it, size))}

    def allowed(size: int) -> list[Layout]:
        layouts = [layout for it in named if (layout := _on(it, size))]
        return layouts if model is None or device is None else [it for it in layouts if _fastest(model, device, it) > 0]

    def modelled(layout: Layout) -> float:
        return 1.0 if model is None or device is None else _fastest(model, device, layout)

    plain = Choice(allowed=allowed, model=modelled, given=own)
    if own:
        return plain
    told = {ranked[0].layout: flops for size, flops in table.items() if (ranked := plain.ranked(size))}
    return replace(plain, measured=told) if model else replace(plain, given=told, allowed=lambda size: _of(told, size))


def layouts(job: str, num_gpus: int, chosen: Choice) -> Layouts:
    """The layouts of a job on the GPUs that it gets."""
    return Layouts(ranked={job: {num_gpus: chosen.ranked(num_gpus)}})


def _on(way: ParallelLayout, size: int) -> Layout | None:
    return way.on(size, max_replicas=None)


def _of(told: Mapping[Layout, float], size: int) -> list[Layout]:
    return [layout for layout in told if layout.num_gpus == size]


def _fastest(model: Model, device: Device, layout: Layout) -> float:
    """FLOP/s with the best micro-batch; 0.0 if the layout does not divide the model or does not fit into memory."""
    parts = ((model.num_attention_heads, layout.tp), (model.num_layers, layout.pp), (model.global_batch_size, layout.dp))
    is_whole = layout.tp <= device.gpus_per_node and not any(whole % part for whole, part in parts)
    share = model.global_batch_size // layout.dp
    candidates = [Candidate(layout=layout, micro_batch=size) for size in MICRO_BATCHES if is_whole and share % size == 0]
    fitting = (it for it in candidates if memory_bytes(model, it) <= device.memory_bytes)
    return max((model_flops(model, device, it) for it in fitting), default=0.0)
