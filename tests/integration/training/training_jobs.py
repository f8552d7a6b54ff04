"""A job small enough to train in a second, and its undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path

from pydantic import TypeAdapter

from unicron_lib.domain.jobs import JobSpec


def tiny(**changes) -> JobSpec:
    values = {
        "job": "tiny",
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 32,
        "global_batch_size": 8,
        "train_iters": 10,
        "save_interval": 4,
        "lr_warmup_iters": 2,
        "params_dtype": "float64",
    }
    return JobSpec(**values | changes)


def reference_losses(spec: JobSpec, directory: Path) -> list[float]:
    (directory / "spec.json").write_bytes(TypeAdapter(JobSpec).dump_json(spec))
    command = [sys.executable, "-m", "unicron_lib.training.reference"]
    subprocess.run([*command, "--spec", directory / "spec.json", "--out", directory / "out.json"], check=True, timeout=120)
    return json.loads((directory / "out.json").read_text())["losses"]
