"""Jobs, states and folders for the tests of `unicron export` and `unicron import`."""

import pickle
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.tensors import pack
from unicron_lib.cli.exchange import export, import_
from unicron_lib.domain.jobs import DEFAULTS, JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.importing import main_dtype
from unicron_lib.training.shards import read_state
from unicron_lib.training.torch_dist import places

State = dict[str, torch.Tensor]

app = typer.Typer()
app.command("export")(export)
app.command("import")(import_)


def tiny(**changes: Any) -> JobSpec:
    small = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "global_batch_size": 4}
    return JobSpec(**{"job": "a", **small, "train_iters": 20, "lr_warmup_iters": 3, "load": "latest", **changes})


def job_file(folder: Path, spec: JobSpec) -> str:
    changed = {key: value for key, value in asdict(spec).items() if key == "job" or value != DEFAULTS[key]}
    entry = {"name": spec.job, "entrypoint": "flows.training.train", "parameters": {"job": changed}}
    path = folder / f"{spec.job}.yaml"
    path.write_text(yaml.safe_dump({"deployments": [entry]}))
    return str(path)


@cache
def random_state(params_dtype: str = "float32", seed: int = 0) -> State:
    """Of the tiny job; nobody may change it."""
    spec = tiny(params_dtype=params_dtype)
    generator = torch.Generator().manual_seed(seed)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}.{name}": torch.rand(place.shape, generator=generator, dtype=main_dtype(spec))
        for kind in kinds
        for name, place in places(spec).items()
    }


def save(store: FileStore, state: State, iteration: int, *, job: str = "a", generation: int = 0) -> Manifest:
    repository = CheckpointRepository(store, job)
    shard = repository.put_shard(
        iteration=iteration, generation=generation, save="all", rank=0, data=pack(state), tensors=tuple(state)
    )
    manifest = Manifest(
        job=job,
        generation=generation,
        iteration=iteration,
        loss=1.0,
        consumed_samples=4 * (iteration + 1),
        layout=Layout(dp=1),
        shards=(shard,),
    )
    repository.commit(manifest)
    return manifest


def newest(store: FileStore, job: str) -> tuple[Manifest, State]:
    repository = CheckpointRepository(store, job)
    manifest, _ = repository.newest_complete()
    assert manifest is not None
    return manifest, read_state(repository, manifest)


def are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def sentence(*arguments: str) -> str:
    """What a command that fails tells."""
    result = run(*arguments)
    assert result.exception is not None
    assert result.exit_code == 1, result.output
    return str(result.exception)


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Have `.metadata` say something else; it is our own, so that it may be unpickled."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
