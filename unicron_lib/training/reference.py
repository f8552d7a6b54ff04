"""The undisturbed run that healed jobs are compared with: `python -m unicron_lib.training.reference --spec F --out F`."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.distributed import HashStore  # type: ignore[attr-defined]

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.training.effort import Effort
from unicron_lib.training.groups import choose_device, leave
from unicron_lib.training.loop import Work
from unicron_lib.training.replica import Replica


def losses(spec: JobSpec) -> Iterator[float]:
    """Train in this process alone; yields the loss of each iteration."""
    device = choose_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        replica, work, effort = Replica(spec, device), Work(spec, replica=0, num_replicas=1), Effort()
        for iteration in range(spec.train_iters):
            replica.begin()
            effort.begin(iteration, work.micro_batches)
            work.do(replica, effort)
            reduced = replica.reduced()
            replica.step(iteration)
            yield reduced.loss
    finally:
        leave()


def main() -> int:
    """Write `{"job": ..., "losses": [...]}` to --out; progress goes to stderr. Exit code 2 for a bad spec."""
    parser = argparse.ArgumentParser(description="Train a job in one process, undisturbed.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of a JobSpec")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the losses")
    arguments = parser.parse_args()
    try:
        spec = TypeAdapter(JobSpec).validate_json(arguments.spec.read_bytes())
        found = list(_told(losses(spec), spec))
    except (OSError, ValidationError, UserError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    temporary = arguments.out.with_name(f".{arguments.out.name}.tmp")
    temporary.write_text(json.dumps({"job": spec.job, "losses": found}))
    temporary.rename(arguments.out)
    return 0


def _told(values: Iterator[float], spec: JobSpec) -> Iterator[float]:
    every = max(1, spec.train_iters // 20)
    for iteration, loss in enumerate(values):
        if (iteration + 1) % every == 0:
            sys.stderr.write(f"reference {spec.job}: iteration {iteration + 1}/{spec.train_iters}, lm loss {loss:.6f}\n")
        yield loss


if __name__ == "__main__":
    sys.exit(main())
