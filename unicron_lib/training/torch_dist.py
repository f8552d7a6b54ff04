"""Megatron's `torch_dist` folders, by megatron-core's own parts: where a model's tensors lie in them, and writing one.

What `dist_checkpointing.save` does, without what it leaves behind: for its writer processes it starts a Manager that
outlives a killed parent, and it waits for ever for a writer that died. So its planner and its conversion are used with
torch's own writer, which starts no process. These are internals: megatron-core is pinned.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import CheckpointError
from unicron_lib.training.megatron import DTYPES, SdpaAttention
from unicron_lib.training.optimizer import BETA1, BETA2, EPS, learning_rate

# isort: split
# after the module that keeps megatron from importing torch's compiler
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

FORMAT = "torch_dist"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN_PARAMETER = "fp32_param"
"""What megatron calls the main copy of a parameter of 16 bits."""
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""How the keys are to be understood; Megatron-LM looks at this first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter lies: whole under `key`, or as `layer` of the `num_layers` that are together under `stacked_key`."""

    shape: tuple[int, ...]
    key: str
    stacked_key: str = ""
    layer: int = 0
    num_layers: int = 0


def places(spec: JobSpec) -> dict[str, Place]:
    """The places of the parameters of the job's model, by their names in the model."""
    with _alone():
        model = _model(spec)
        stacked, single = _sharded(model, is_stacked=True), _sharded(model, is_stacked=False)
    return {name: _place(stacked[name], single[name]) for name, _ in model.named_parameters()}


def _place(stacked: ShardedTensor, single: ShardedTensor) -> Place:
    shape = tuple(single.local_shape)
    if not stacked.prepend_axis_num:
        return Place(shape=shape, key=single.key)
    layer, num_layers = stacked.global_offset[0], stacked.global_shape[0]
    return Place(shape=shape, key=single.key, stacked_key=stacked.key, layer=layer, num_layers=num_layers)


def write(
    folder: Path, spec: JobSpec, state: Mapping[str, torch.Tensor], *, iterations: int, common: Mapping[str, Any]
) -> None:
    """Write a state after so many iterations into an empty folder, `common` beside it. Raises CheckpointError."""
    try:
        with _alone():
            model = _model(spec)
            everything = _sharded(model, is_stacked=True)
            named = {name: _filled(everything[name], state[f"param.{name}"]) for name, _ in model.named_parameters()}
            optimizer = _optimizer(model, spec, named, state, iterations)
            _save(folder, {**common, "model": everything | named, "optimizer": optimizer, "content_metadata": dict(CONTENT)})
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(f"{folder} cannot be written: {' '.join(str(error).split())[:300]}") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be written: {' '.join(str(error).split())[:300]}") from error


def _save(folder: Path, content: dict[str, Any]) -> None:
    """The steps of `dist_checkpointing.save`, its configuration last."""
    tensors, common = save_preprocess(content)
    TorchCommonSaveStrategy("torch", 1).save_common(common, str(folder))
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    save(mcore_to_pyt_state_dict(by_key), storage_writer=FileSystemWriter(folder), planner=planner)
    save_config(CheckpointingConfig(FORMAT, 1), str(folder))


def _optimizer(
    model: torch.nn.Module,
    spec: JobSpec,
    named: Mapping[str, ShardedTensor],
    state: Mapping[str, torch.Tensor],
    iterations: int,
) -> dict[str, Any]:
    """As megatron's FP32Optimizer has it; for a model of 16 bits as its Float16OptimizerWithFloat16Params has it."""
    parameters = dict(model.named_parameters())
    grouped = [[name for name in parameters if (parameters[name].dim() >= 2) == decayed] for decayed in (True, False)]
    order = [name for group in grouped for name in group]
    moments = {number: {it: _like(named[name], state, it, name) for it in MOMENTS} for number, name in enumerate(order)}
    told: dict[str, Any] = {
        "state": {**moments, "common_step": torch.tensor(float(iterations))},
        "param_groups": _groups(spec, [[parameters[name] for name in group] for group in grouped], iterations),
    }
    if DTYPES[spec.params_dtype].itemsize > 2:
        return told
    mains = [[_like(named[name], state, "param", name, called=MAIN_PARAMETER) for name in group] for group in grouped]
    return {"optimizer": told, "fp32_from_fp16_params": mains}


def _like(parameter: ShardedTensor, state: Mapping[str, torch.Tensor], kind: str, name: str, called: str = "") -> ShardedTensor:
    return make_sharded_optimizer_tensor(parameter, state[f"{kind}.{name}"], prefix=f"optimizer.state.{called or kind}")


def _groups(spec: JobSpec, parameters: list[list[torch.nn.Parameter]], iterations: int) -> list[dict[str, Any]]:
    """Two groups as megatron's, with and without weight decay, as torch's AdamW or the fused one of others reads them."""
    common = {
        "max_lr": spec.lr,
        "min_lr": spec.min_lr,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": False,
        "default_config": True,
        "step": iterations,
        "bias_correction": True,
    }
    groups = [
        {"params": group, **common, "wd_mult": factor, "weight_decay": factor * spec.weight_decay}
        for group, factor in zip(parameters, (1.0, 0.0), strict=True)
    ]
    lr = learning_rate(spec, max(0, iterations - 1))
    told = torch.optim.AdamW(groups, lr=lr, betas=(BETA1, BETA2), eps=EPS).state_dict()["param_groups"]
    return [{**group, "params": LocalNonpersistentObject(group["params"])} for group in told]


def _filled(parameter: ShardedTensor, value: torch.Tensor) -> ShardedTensor:
    return replace(parameter, data=value.to(parameter.dtype))


def _sharded(model: torch.nn.Module, *, is_stacked: bool) -> dict[str, Any]:
    """All that megatron saves of a model, by the names in it: the parameters, and what it calls extra states."""
    return model.sharded_state_dict(metadata={"singleton_local_shards": not is_stacked})  # type: ignore[operator, no-any-return]


def _model(spec: JobSpec) -> torch.nn.Module:
    """The job's model without memory for its parameters, built as any user of megatron-core builds one."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    dtype = DTYPES[spec.params_dtype]
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )
    with torch.device("meta"):
        return GPTModel(  # type: ignore[no-any-return]
            config=config,
            transformer_layer_spec=layer,
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.seq_length,
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
        ).to(dtype)


@contextmanager
def _alone() -> Iterator[None]:
    """Megatron and torch's writer ask for process groups: here they are of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
