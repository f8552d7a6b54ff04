"""Jobs of a scenario that are described by their model instead of a table of throughputs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from unicron_lib.domain.plans import Layout
from unicron_lib.planning.calibration import calibrated
from unicron_lib.planning.layouts import Device, Model
from unicron_lib.planning.model_profile import A100, H100, best_layouts

AtLeastOne = Annotated[int, Field(ge=1, le=10_000_000)]
Gpu = Literal["a100", "h100"]

DEVICES: Mapping[str, Device] = {"a100": A100, "h100": H100}


class GptModel(BaseModel):
    """The key `model` of a job: a GPT model, in Megatron's words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: AtLeastOne
    hidden_size: AtLeastOne
    num_attention_heads: AtLeastOne
    seq_length: AtLeastOne
    vocab_size: AtLeastOne
    global_batch_size: AtLeastOne
    recompute: bool = True
    virtual_stages: AtLeastOne = 1

    def described(self) -> Model:
        """As the profile sees it. Raises UserError for values that do not fit together."""
        return Model(**self.model_dump())


def table(model: GptModel, *, gpu: Gpu, gpus_per_node: int, sizes: set[int], measured: Mapping[int, float]) -> dict[int, float]:
    """T(t, x) of those `sizes` on which the model fits into memory, calibrated by what was `measured`."""
    most = max(sizes, default=0)
    found = best_layouts(model.described(), device(gpu, gpus_per_node), at_most=max((most, *measured)))
    scaling = calibrated(lambda size: found[size].flops if size in found else 0.0, measured)
    known = {size: scaling(best.flops) for size, best in found.items() if size in sizes}
    return dict(sorted({**known, **{size: flops for size, flops in measured.items() if size in sizes}}.items()))


def layout(model: GptModel, num_gpus: int, *, gpu: Gpu, gpus_per_node: int) -> Layout:
    """The fastest layout on `num_gpus` GPUs; of data parallelism only for a size that was measured but does not fit."""
    found = best_layouts(model.described(), device(gpu, gpus_per_node), at_most=num_gpus)
    return found[num_gpus].layout if num_gpus in found else Layout(dp=num_gpus)


def device(gpu: Gpu, gpus_per_node: int) -> Device:
    """What jobs that are described by their model are reckoned on."""
    return replace(DEVICES[gpu], gpus_per_node=gpus_per_node)
