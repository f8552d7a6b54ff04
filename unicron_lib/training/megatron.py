"""The model, from megatron-core's parts. Megatron's internals are touched here, and in `torch_dist`."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from unicron_lib.domain.jobs import JobSpec


@contextmanager
def _compiler_unused() -> Iterator[None]:
    """Without a GPU: keep megatron's fused kernels, which the trainer does not use there, from importing torch's compiler."""
    # a check by the driver's library, since a check by the runtime would spoil CUDA for forked ranks
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available():
        yield
        return
    real = torch.compile
    torch.compile = _unchanged
    try:
        yield
    finally:
        torch.compile = real


def _unchanged(model: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return model if model is not None else _unchanged


with warnings.catch_warnings(), _compiler_unused():
    warnings.simplefilter("ignore")  # each part of apex and transformer-engine that is not installed warns
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
INIT_STD = 0.02


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's own kernel: megatron's asks for a CUDA device, also on a CPU."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """From [sequence, batch, heads, channels] three times to [sequence, batch, heads * channels]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def build_model(spec: JobSpec, device: torch.device) -> torch.nn.Module:
    """A GPT model on `device`, with the initial parameters of the job's seed: the same in every layout."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    with _default_group():
        model = GPTModel(
            config=_config(spec),
            transformer_layer_spec=layer,
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.seq_length,
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
            pg_collection=_groups_of_one(),
        ).to(device=device, dtype=DTYPES[spec.params_dtype])
    initialize(model, spec)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def initialize(model: torch.nn.Module, spec: JobSpec) -> None:
    """Give the model the initial parameters of the job's seed."""
    for name, parameter in model.named_parameters():
        _initialize(name, parameter, spec)


@contextmanager
def dropout_of(spec: JobSpec, device: torch.device, place: str) -> Iterator[None]:
    """In the block, what dropout leaves out depends on the job's seed and `place` only; nothing else is changed by it."""
    if not spec.hidden_dropout:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_seed(spec.seed, f"dropout/{place}"))
        yield


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a micro-batch of [batch, seq_length + 1] tokens, in float32 or the model's own float64."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    logits = model(inputs, positions, None)
    # megatron's own cross entropy rounds float64 to float32, and runs three collectives in a group of one
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _groups_of_one() -> ProcessGroupCollection:
    """The rank's model-parallel groups: tensor and pipeline parallelism of 1, for now.

    `parallel_state.initialize_model_parallel` forms some thirty gloo groups, two threads and a socket to every peer
    each. The model needs none: with a group of one, megatron asks for nothing but its size. So the model outlives the
    groups of its rank's generations.
    """
    alone = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    return ProcessGroupCollection(**dict.fromkeys(("tp", "pp", "cp", "tp_cp", "embd", "pos_embd", "ep", "expt_tp"), alone))


@contextmanager
def _default_group() -> Iterator[None]:
    """While the model is built, torch has a default group: without one megatron forgets the groups that it is given."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _config(spec: JobSpec) -> TransformerConfig:
    dtype = DTYPES[spec.params_dtype]
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        hidden_dropout=spec.hidden_dropout,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=torch.cuda.is_available(),
        bias_activation_fusion=torch.cuda.is_available(),
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


def _initialize(name: str, parameter: torch.nn.Parameter, spec: JobSpec) -> None:
    """GPT-2's initialisation as Megatron does it, drawn per parameter from the seed and its name."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        is_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        std = INIT_STD / (2 * spec.num_layers) ** 0.5 if is_residual else INIT_STD
        generator = torch.Generator().manual_seed(_seed(spec.seed, name))
        values = torch.empty(parameter.shape, dtype=torch.float64).normal_(0.0, std, generator=generator)
        parameter.copy_(values)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")
