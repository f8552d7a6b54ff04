"""What Unicron is measured against: the same model and data under torchrun, with checkpoints on the local disk.

`python -m torch.distributed.run ... -m unicron_lib.training.baseline --spec F --dir D`. Rank 0 saves by `torch.save` to D
every `save_interval` iterations; after a restart all go on from there. SIGUSR1 raises an exception in a rank.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.jobfile import job_spec
from unicron_lib.training.effort import Effort
from unicron_lib.training.groups import choose_device
from unicron_lib.training.ledger import Entry, Ledger, ledger_directory
from unicron_lib.training.loop import Work
from unicron_lib.training.replica import Reduced, Replica

log = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


class Fault:
    """An exception that somebody wants by SIGUSR1."""

    def __init__(self) -> None:
        self._wanted = False
        signal.signal(signal.SIGUSR1, lambda _number, _frame: self._want())

    def _want(self) -> None:
        self._wanted = True

    def raise_if_wanted(self) -> None:
        """Raises ConnectionResetError if it is wanted."""
        if self._wanted:
            raise ConnectionResetError("injected: connection reset by peer")


def train(spec: JobSpec, directory: Path) -> None:
    """Train to the last iteration, from the checkpoint in `directory` if there is one; torchrun's variables name the rank."""
    fault, device = Fault(), choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    replica, work = Replica(spec, device), Work(spec, replica=rank, num_replicas=dist.get_world_size())
    first = load(replica, directory / CHECKPOINT)
    ledgers = ledger_directory(directory, spec.job)
    with Ledger(ledgers, generation=_new_generation(ledgers, rank), rank=rank) as ledger:
        for iteration, reduced in _iterations(spec, replica, work, fault, first):
            ledger.write(Entry(iteration=iteration, samples=reduced.samples, loss=reduced.loss))
            if rank == 0 and (iteration + 1) % spec.save_interval == 0:
                save(replica, iteration, directory / CHECKPOINT)
    dist.destroy_process_group()


def _iterations(spec: JobSpec, replica: Replica, work: Work, fault: Fault, first: int) -> Iterator[tuple[int, Reduced]]:
    effort = Effort()
    for iteration in range(first, spec.train_iters):
        started = time.monotonic()
        compute(replica, work, effort, iteration)
        time.sleep(max(0.0, spec.pace_s - (time.monotonic() - started)))
        fault.raise_if_wanted()
        dist.all_reduce(replica.buffer)
        reduced = replica.reduced()
        replica.step(iteration)
        yield iteration, reduced


def compute(replica: Replica, work: Work, effort: Effort, iteration: int) -> None:
    """The rank's own part of an iteration."""
    replica.begin()
    effort.begin(iteration, work.micro_batches)
    work.do(replica, effort)


def save(replica: Replica, iteration: int, path: Path) -> None:
    """Write a checkpoint that replaces the one before only once it is complete."""
    partial = path.with_suffix(".partial")
    torch.save({"iteration": iteration, "state": replica.state()}, partial)
    partial.replace(path)


def load(replica: Replica, path: Path) -> int:
    """Load the checkpoint if there is one; the first iteration to do."""
    if not path.exists():
        return 0
    found = torch.load(path, map_location=replica.device, weights_only=True)
    replica.load(found["state"])
    return int(found["iteration"]) + 1


def _new_generation(ledgers: Path, rank: int) -> int:
    """One more than any before, the same on all ranks: torchrun's own count does not tell a lost node."""
    known = [int(path.name[1:].partition("-")[0]) for path in ledgers.glob("g*-r*.jsonl")] if rank == 0 else []
    newest = torch.tensor([max(known, default=0)])
    dist.broadcast(newest, src=0)
    return int(newest) + 1


@record
def main() -> None:
    """Train the job of --spec in --dir."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(description="Train a job under torchrun.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of a JobSpec")
    parser.add_argument("--dir", type=Path, required=True, help="for the checkpoint and the ledgers")
    arguments = parser.parse_args()
    train(job_spec.validate_json(arguments.spec.read_bytes()), arguments.dir)


if __name__ == "__main__":
    main()
