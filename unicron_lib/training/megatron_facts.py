"""What Megatron-LM keeps in `common.pt`: how far the training is, and the arguments that it was started with.

Read inert (see `inert_pickle`): nothing of it is ever loaded.
"""

import argparse
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unicron_lib.checkpointing.inert_pickle import Made, Named, read_inert
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import CheckpointError
from unicron_lib.training.optimizer import BETA1, BETA2, EPS

COMMON = "common.pt"
LARGEST_COMMON = 1 << 28
CHECKPOINT_VERSION = 3.0
"""Megatron-LM's, of how it lays out queries, keys and values."""
FFN_FACTOR = 4
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of a checkpoint: its iterations, the optimizer's steps (None where nothing is said), and Megatron-LM's arguments."""

    iterations: int | None = None
    steps: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)


def common_state(spec: JobSpec, iterations: int) -> dict[str, Any]:
    """What Megatron-LM asks for beside the tensors, as far as we know it: no seeds of its own, no data of its own."""
    samples = iterations * spec.global_batch_size
    scheduler = {
        "max_lr": spec.lr,
        "min_lr": spec.min_lr,
        "num_steps": samples,
        "lr_warmup_steps": spec.lr_warmup_iters * spec.global_batch_size,
        "lr_decay_style": "cosine",
        "lr_decay_steps": spec.train_iters * spec.global_batch_size,
        "start_wd": spec.weight_decay,
        "end_wd": spec.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": spec.train_iters * spec.global_batch_size,
    }
    args = argparse.Namespace(**_model_arguments(spec), **_training_arguments(spec), consumed_train_samples=samples)
    version = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": iterations}
    return {**version, "args": args, "opt_param_scheduler": scheduler, "num_floating_point_operations_so_far": 0}


def _model_arguments(spec: JobSpec) -> dict[str, Any]:
    """Under Megatron-LM's names; all of them decide what a model computes."""
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": FFN_FACTOR * spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "group_query_attention": False,
        "padded_vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.seq_length,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": False,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "norm_epsilon": LAYER_NORM_EPS,
        "apply_layernorm_1p": False,
        "swiglu": False,
        "squared_relu": False,
        "openai_gelu": False,
        "apply_residual_connection_post_layernorm": False,
        "num_experts": None,
    }


def _training_arguments(spec: JobSpec) -> dict[str, Any]:
    return {
        "seq_length": spec.seq_length,
        "vocab_size": spec.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "micro_batch_size": spec.micro_batch_size,
        "global_batch_size": spec.global_batch_size,
        "train_iters": spec.train_iters,
        "seed": spec.seed,
        "lr": spec.lr,
        "min_lr": spec.min_lr,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": spec.lr_warmup_iters,
        "weight_decay": spec.weight_decay,
        "clip_grad": spec.clip_grad,
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_eps": EPS,
        "optimizer": "adam",
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": 0.0,
        "bf16": spec.params_dtype == "bfloat16",
        "fp16": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "use_distributed_optimizer": False,
        "data_parallel_random_init": False,
        "phase_transition_iterations": None,
        "tokenizer_type": "NullTokenizer",
        "vocab_file": None,
        "ckpt_format": "torch_dist",
        "consumed_valid_samples": 0,
    }


def refuse_another_model(spec: JobSpec, facts: Facts) -> None:
    """Raises CheckpointError for the first argument that makes the model compute something else than the job's."""
    for name, ours in _model_arguments(spec).items():
        if name in facts.args and facts.args[name] != ours:
            told = f"the checkpoint was trained with {name} {facts.args[name]!r}, the job has {ours!r}"
            raise CheckpointError(f"{told}{_advice(name)}")


def _advice(name: str) -> str:
    keys = {"padded_vocab_size": "vocab_size", "max_position_embeddings": "seq_length"}
    key = keys.get(name, name)
    return f": change {key} in the job's file" if key in JobSpec.__dataclass_fields__ else ", and knows no other"


def read_facts(folder: Path) -> Facts:
    """What `common.pt` says, nothing if there is none; raises CheckpointError if it is damaged or refused."""
    path = folder / COMMON
    if not path.exists():
        return Facts()
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next((it for it in archive.infolist() if it.filename.endswith("/data.pkl")), None)
            if entry is None or entry.file_size > LARGEST_COMMON or archive.testzip() is not None:
                raise CheckpointError(f"{path} is damaged, or no file of torch.save")
            common = read_inert(archive.read(entry), origin=str(path))
            return _facts(common, archive, entry.filename.removesuffix("data.pkl"))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, OverflowError, struct.error, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged, or no file of torch.save") from error


def _facts(common: object, archive: zipfile.ZipFile, root: str) -> Facts:
    if not isinstance(common, dict):
        return Facts()
    iterations = common.get("iteration")
    args = common.get("args")
    told = args.state if isinstance(args, Made) and isinstance(args.state, dict) else {}
    plain = {key: value for key, value in told.items() if isinstance(value, str | int | float | None)}
    return Facts(
        iterations=iterations if isinstance(iterations, int) and iterations >= 0 else None,
        steps=_steps(common.get("optimizer"), archive, root),
        args=plain,
    )


def _steps(optimizer: object, archive: zipfile.ZipFile, root: str) -> int | None:
    """The steps that the optimizer has made, in one of the places where megatron's optimizers keep them."""
    match optimizer:
        case {"state": {"common_step": step}}:
            return _number(step, archive, root)
        case {"param_groups": [{"step": step}, *_]}:
            return _number(step, archive, root)
        case {"optimizer": dict(inner)}:
            return _steps(inner, archive, root)
    return None


def _number(value: object, archive: zipfile.ZipFile, root: str) -> int | None:
    match value:
        case int(number) | float(number):
            return int(number)
        case Made(
            what=Named(name="torch._utils._rebuild_tensor_v2"),
            arguments=(Made(arguments=("storage", Named(name="torch.FloatStorage"), str(key), *_)), 0, (), *_),
        ):
            return int(struct.unpack_from("<f", archive.read(f"{root}data/{key}"))[0])
    return None
