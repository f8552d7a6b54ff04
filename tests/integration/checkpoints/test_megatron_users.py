"""A user of megatron-core, in processes of his own: what he saved starts a job, and what a job saved he goes on from."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_scenes import are_equal, job_file, newest, random_state, run, save, tiny
from torch.distributed import HashStore, TCPStore

from unicron_lib.adapters.files import FileStore
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.effort import Effort
from unicron_lib.training.loop import Work
from unicron_lib.training.replica import Replica

PROGRAM = "import megatron_user; megatron_user.main()"
PATIENCE_S = 280.0
SAVE_AT, UNTIL = 4, 8


@contextmanager
def user(folder: Path, what: str, *, world_size: int, **request: Any) -> Iterator["Answer"]:
    """The user's processes, which go on while the block does something else; it ends with all of them ended.

    Megatron leaves a process behind, which would keep a pipe open: the output goes to files, and sessions are killed.
    """
    (folder / "request.json").write_text(json.dumps(request))
    # the ranks' own rendezvous store, which chooses a free port, and lives as long as they do
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = []
    for rank in range(world_size):
        command = [sys.executable, "-c", PROGRAM, what, str(folder / "request.json")]
        with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                cwd=Path(__file__).parent,
                env={**env, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"},
                start_new_session=True,
            )
        processes.append(process)
    try:
        yield Answer(folder, processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Answer:
    """What rank 0 will say."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._processes = processes

    def wait(self) -> dict[str, Any]:
        for rank, process in enumerate(self._processes):
            assert process.wait(PATIENCE_S) == 0, (self._folder / f"err{rank}").read_text()[-3000:]
        return json.loads((self._folder / "out0").read_text().splitlines()[-1])


def losses(spec: JobSpec, state: dict[str, torch.Tensor], iterations: range) -> list[float]:
    """Of our trainer, which goes on from the state."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        replica, work, effort = Replica(spec, torch.device("cpu")), Work(spec, replica=0, num_replicas=1), Effort()
        replica.load(state)
        found = []
        for iteration in iterations:
            replica.begin()
            effort.begin(iteration, work.micro_batches)
            work.do(replica, effort)
            found.append(replica.reduced().loss)
            replica.step(iteration)
        return found
    finally:
        dist.destroy_process_group()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "store").mkdir()
    return FileStore(tmp_path / "store")


@pytest.fixture
def exported(store: FileStore, tmp_path: Path) -> Callable[[JobSpec], tuple[str, dict[str, torch.Tensor]]]:
    """Our checkpoint of a job that has ten iterations behind it, as Megatron's folder; and its state."""

    def make(spec: JobSpec) -> tuple[str, dict[str, torch.Tensor]]:
        state = {name: it * 0.1 for name, it in random_state(spec.params_dtype).items()}
        save(store, state, 9, job="ours")
        file = job_file(tmp_path, replace(spec, job="ours"))
        assert run("export", file, str(tmp_path / "ours"), "--store", store.url).exit_code == 0
        return str(tmp_path / "ours" / "iter_0000010"), state

    return make


def check_loaded(told: dict[str, Any], spec: JobSpec, state: dict[str, torch.Tensor]) -> None:
    """What the user has after loading what was exported of the state."""
    assert (told["iteration"], told["steps"], told["decays"]) == (10, [10.0], [0.0, 0.01])
    assert (told["num_steps"], told["num_layers"]) == (40, 2)
    assert told["loss"] == pytest.approx(losses(spec, state, range(10, 11))[0], abs=1e-6)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("params_dtype", ["float32", pytest.param("float64", marks=pytest.mark.storm)])
def test_a_users_training_goes_on_as_if_nothing_had_been(
    store: FileStore, tmp_path: Path, exported: Any, params_dtype: str
) -> None:
    spec = tiny(params_dtype=params_dtype)
    target, kept = str(tmp_path / "user"), str(tmp_path / "parameters.pt")
    folder, ours = exported(spec)
    what = {"until": UNTIL, "save_at": SAVE_AT, "to": target, "parameters": kept, "checkpoint": folder}
    with user(tmp_path, "train", world_size=1, spec=asdict(spec), **what) as answer:
        told = answer.wait()
    result = run("import", job_file(tmp_path, spec), target, "--store", store.url, "--json")
    assert (json.loads(result.stdout)["iteration"], json.loads(result.stdout)["notes"]) == (SAVE_AT - 1, [])
    _, state = newest(store, "a")
    saved = torch.load(kept, weights_only=True)
    assert are_equal({name: state[f"param.{name}"] for name in saved}, saved)
    tolerance = {"float32": 1e-6, "float64": 1e-12}[params_dtype]
    uninterrupted = told["losses"][SAVE_AT:]
    assert losses(spec, state, range(SAVE_AT, UNTIL)) == pytest.approx(uninterrupted, abs=tolerance)
    check_loaded(told, spec, ours)


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_tensor_parallel_users_load_ours_and_save_what_we_load(store: FileStore, tmp_path: Path, exported: Any) -> None:
    """Bit-equal there and back, by Megatron's own `dist_checkpointing` with tensor parallelism of 2."""
    spec, target = tiny(), str(tmp_path / "user")
    folder, state = exported(spec)
    with user(tmp_path, "reshard", world_size=2, spec=asdict(spec), checkpoint=folder, to=target) as answer:
        told = answer.wait()
    check_loaded(told, spec, state)
    assert run("import", job_file(tmp_path, spec), target, "--store", store.url).exit_code == 0
    _, there = newest(store, "a")
    assert are_equal(there, state)
