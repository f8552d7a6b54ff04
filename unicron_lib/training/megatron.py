"""The model, from megatron-core's parts. Megatron's internals are touched here, and in `torch_dist`."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from unicron_lib.checkpointing.model_state import TIED, slices_at
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.siblings import Siblings, StandIn


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
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

# megatron says so when a line is used; it would let sums overlap, ours wait
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
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


class Model:
    """A rank's part of a GPT model on `device`, with the initial parameters of the job's seed: the same in every layout."""

    def __init__(self, spec: JobSpec, device: torch.device, siblings: Siblings) -> None:
        self._spec, self._device, self._siblings = spec, device, siblings
        self._dropout_at = ""
        self._line = StandIn(siblings, rank=siblings.place.tp, size=siblings.layout.tp)
        self._model = self._build().to(device=device, dtype=DTYPES[spec.params_dtype])
        slices = slices_at(spec, siblings.layout, siblings.place)
        self.parameters = {self._whole_name(name): parameter for name, parameter in self._model.named_parameters()}
        assert {name: tuple(it.shape) for name, it in self.parameters.items()} == {name: it.size for name, it in slices.items()}
        self.slices = {name: slices[name] for name in self.parameters}
        self.initialize()
        if spec.hidden_dropout:
            for layer in self._model.decoder.layers:
                layer.register_forward_pre_hook(lambda layer, _: self._seed_dropout(layer.layer_number))

    def _build(self) -> Any:
        spec, siblings = self._spec, self._siblings
        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
        with _default_group():
            return GPTModel(
                config=_config(spec, siblings.layout),
                transformer_layer_spec=layer,
                vocab_size=spec.vocab_size,
                max_sequence_length=spec.seq_length,
                share_embeddings_and_output_weights=True,
                position_embedding_type="learned_absolute",
                pre_process=siblings.is_first,
                post_process=siblings.is_last,
                pg_collection=self._groups(),
            )

    def _groups(self) -> ProcessGroupCollection:
        """Groups that are no backend's.

        `parallel_state.initialize_model_parallel` forms some thirty gloo groups, two threads and a socket to every peer
        each. The model needs one, the line; of the others megatron asks for nothing but the rank and the size. So the model
        outlives the groups of its rank's generations. The two ends of a tied embedding are not tied by megatron, but by us.
        """
        siblings = self._siblings
        alone = StandIn(siblings, rank=0, size=1)
        stages = StandIn(siblings, rank=siblings.place.pp, size=siblings.layout.pp)
        others = dict.fromkeys(("cp", "tp_cp", "ep", "expt_tp"), alone)
        return ProcessGroupCollection(tp=self._line, pp=stages, embd=None, pos_embd=None, **others)

    def _whole_name(self, name: str) -> str:
        """What a parameter is called in the whole model."""
        if name == "output_layer.weight":
            return TIED
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if not match:
            return name
        before = self._siblings.place.pp * self._spec.num_layers // self._siblings.layout.pp
        return f"decoder.layers.{before + int(match[1])}.{match[2]}"

    @torch.no_grad()
    def initialize(self) -> None:
        """Give the model the initial parameters of the job's seed."""
        for name, parameter in self.parameters.items():
            _initialize(name, parameter, self.slices[name], self._spec)

    def forward(self, tokens: torch.Tensor, arrived: torch.Tensor | None, *, place: str) -> torch.Tensor:
        """The loss of a micro-batch of [batch, seq_length + 1] tokens, or what the next stage needs: [seq, batch, hidden].

        The loss is the mean cross entropy, in float32 or the model's own float64. What dropout leaves out depends on the job's
        seed, the layer and `place` only.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
        self._model.set_input_tensor(arrived)
        with self._siblings.computing(), self._dropout_of(place):
            found: torch.Tensor = self._model(inputs, positions, None)
            return self._loss(found, targets) if self._siblings.is_last else found

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` has returned to those of its parameters."""
        with self._siblings.computing():
            output.backward(gradient)  # type: ignore[no-untyped-call]

    @contextmanager
    def _dropout_of(self, place: str) -> Iterator[None]:
        """In the block, nothing but the dropout is changed by what is random."""
        if not self._spec.hidden_dropout:
            yield
            return
        self._dropout_at = place
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._seed_dropout(0)
            yield

    def _seed_dropout(self, layer: int) -> None:
        torch.manual_seed(_seed(self._spec.seed, f"dropout/{self._dropout_at}/{layer}"))

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # megatron's own cross entropy rounds float64 to float32, and runs three collectives
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._siblings.layout.tp == 1:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self._cross_entropy_in_line(logits.flatten(0, 1), targets.flatten())

    def _cross_entropy_in_line(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of logits that each rank of the line has a slice of the vocabulary of: one sum brings all that is needed."""
        size, own = logits.shape[1], self._siblings.place.tp
        local = targets - own * size
        is_here = (local >= 0) & (local < size)
        of_targets = logits.gather(1, local.clamp(0, size - 1).unsqueeze(1)).squeeze(1) * is_here
        rows = [torch.zeros_like(of_targets) for _ in range(self._siblings.layout.tp)]
        rows[own] = logits.logsumexp(1)
        told: torch.Tensor = reduce_from_tensor_model_parallel_region(torch.stack([*rows, of_targets]), group=self._line)
        return (told[:-1].logsumexp(0) - told[-1]).mean()


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


def _config(spec: JobSpec, layout: Layout) -> TransformerConfig:
    dtype = DTYPES[spec.params_dtype]
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
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


def _initialize(name: str, parameter: torch.nn.Parameter, piece: TensorSlice, spec: JobSpec) -> None:
    """GPT-2's initialisation as Megatron does it, drawn per whole parameter from the seed and its name."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        is_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        std = INIT_STD / (2 * spec.num_layers) ** 0.5 if is_residual else INIT_STD
        generator = torch.Generator().manual_seed(_seed(spec.seed, name))
        values = torch.empty(piece.whole, dtype=torch.float64).normal_(0.0, std, generator=generator)
        parameter.copy_(values[piece.within(TensorSlice.all_of(piece.whole))])


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")
