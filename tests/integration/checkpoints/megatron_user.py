"""What a user of megatron-core does without us: `train` and save, or `reshard` what was saved to tensor parallelism of 2.

Run by `python -c "import megatron_user; megatron_user.main()" train|reshard REQUEST.json`: so that the process that Megatron
spawns for its writers does not import all this once more. The last line of stdout is a JSON object, of rank 0.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.overrides import TorchFunctionMode

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.data import open_corpus, sample_order
from unicron_lib.training.megatron import DTYPES, SdpaAttention
from unicron_lib.training.optimizer import learning_rate

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, _get_param_groups
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig


class CudaAsCpu(TorchFunctionMode):
    """Megatron's optimizer makes one tensor on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def build(spec: JobSpec, tp: int, seed: int) -> GPTModel:
    """A model with random parameters of the user's own."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        tensor_model_parallel_size=tp,
        params_dtype=DTYPES[spec.params_dtype],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        cuda_graph_scope=[],
    )
    torch.manual_seed(seed)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.seq_length,
        parallel_output=False,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    ).to(DTYPES[spec.params_dtype])


def optimizer_of(model: GPTModel, spec: JobSpec) -> FP32Optimizer:
    config = OptimizerConfig(optimizer="adam", lr=spec.lr, min_lr=spec.min_lr, weight_decay=spec.weight_decay)
    adam = torch.optim.AdamW(_get_param_groups([model], config, None), lr=spec.lr, weight_decay=spec.weight_decay)

    def fill(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] |= {"step": torch.tensor(0.0), **zeros}

    with CudaAsCpu():
        return FP32Optimizer(adam, config, fill)


def scheduler_of(optimizer: FP32Optimizer, spec: JobSpec) -> OptimizerParamScheduler:
    size = spec.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=spec.lr,
        min_lr=spec.min_lr,
        lr_warmup_steps=spec.lr_warmup_iters * size,
        lr_decay_steps=spec.train_iters * size,
        lr_decay_style="cosine",
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=spec.train_iters * size,
        wd_incr_style="constant",
    )


def loss_of(model: GPTModel, spec: JobSpec, iteration: int) -> torch.Tensor:
    """Over the whole global batch."""
    corpus = open_corpus(spec)
    taken = sample_order(spec, corpus).samples(iteration)
    rows = torch.stack([torch.frombuffer(bytearray(corpus.sample(s)), dtype=torch.uint8) for s in taken]).long()
    inputs, targets = rows[:, :-1], rows[:, 1:]
    logits = model(inputs, torch.arange(inputs.shape[1]).expand_as(inputs), None)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: GPTModel, optimizer: FP32Optimizer, spec: JobSpec, iteration: int) -> float:
    model.zero_grad()
    loss = loss_of(model, spec, iteration)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_grad)
    for group in optimizer.optimizer.param_groups:
        group["lr"] = learning_rate(spec, iteration)
        group["weight_decay"] = spec.weight_decay * group["wd_mult"]
    optimizer.optimizer.step()
    return loss.item()


def save(model: GPTModel, optimizer: FP32Optimizer, spec: JobSpec, directory: Path, iterations: int) -> None:
    """As Megatron-LM's `save_checkpoint` does it."""
    folder = directory / f"iter_{iterations:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    sharded = model.sharded_state_dict()
    args = Namespace(
        num_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        padded_vocab_size=spec.vocab_size,
        attention_backend=AttnBackend.auto,
        params_dtype=DTYPES[spec.params_dtype],
        consumed_train_samples=iterations * spec.global_batch_size,
        data_path=["a", "b"],
    )
    common = {"args": args, "checkpoint_version": 3.0, "iteration": iterations}
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    rng = {"rng_state": ShardedObject("rng_state", [{"seed": 1}], (1, tp), (0, rank))}
    state = {**common, **rng, "model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})
    if dist.get_rank() == 0:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(iterations))


def train(spec: JobSpec, request: dict[str, Any]) -> dict[str, Any]:
    """Train `until`, save after `save_at` iterations; then load `checkpoint` instead."""
    model = build(spec, 1, seed=7)
    optimizer = optimizer_of(model, spec)
    losses: list[float] = []
    for iteration in range(request["until"]):
        if iteration == request["save_at"]:
            save(model, optimizer, spec, Path(request["to"]), iteration)
            tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            torch.save(tensors, request["parameters"])
        losses.append(step(model, optimizer, spec, iteration))
    return {"losses": losses, **load(model, optimizer, spec, request["checkpoint"])}


def reshard(spec: JobSpec, request: dict[str, Any]) -> dict[str, Any]:
    """Load `checkpoint` into parameters of another seed, save to another directory."""
    model = build(spec, 2, seed=11 + dist.get_rank())
    optimizer = optimizer_of(model, spec)
    told = load(model, optimizer, spec, request["checkpoint"])
    save(model, optimizer, spec, Path(request["to"]), told["iteration"])
    return told


def load(model: GPTModel, optimizer: FP32Optimizer, spec: JobSpec, folder: str) -> dict[str, Any]:
    """As Megatron-LM's `load_checkpoint` does it, which has everything there; then the loss of the next iteration."""
    sharded = model.sharded_state_dict()
    wanted = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True)}
    loaded = dist_checkpointing.load(wanted, folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler = scheduler_of(optimizer, spec)
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    with torch.no_grad():
        loss = loss_of(model, spec, loaded["iteration"]).item()
    return {
        "iteration": loaded["iteration"],
        "num_layers": loaded["args"].num_layers,
        "loss": loss,
        "steps": sorted({float(state["step"]) for state in optimizer.optimizer.state.values()}),
        "decays": sorted({group["weight_decay"] for group in optimizer.optimizer.param_groups}),
        "num_steps": scheduler.num_steps,
    }


def main() -> None:
    what, path = sys.argv[1:]
    request = json.loads(Path(path).read_text())
    spec = TypeAdapter(JobSpec).validate_python(request["spec"])
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # Megatron's writer asks for both
        torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    answer = {"train": train, "reshard": reshard}[what](spec, request)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(answer) + "\n")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
