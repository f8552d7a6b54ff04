"""What Unicron is measured against: the same model and data under torchft, each rank a replica group of its own.

torchft is no dependency of ours. `python -m unicron_lib.training.baseline_torchft --spec F --dir D --rank R --lighthouse PORT`;
with `--serve` it is the lighthouse. The micro-batches are those of all ranks that take part, so that the batch stays the same.
SIGUSR1 raises an exception in a rank.
"""

import argparse
import importlib
import logging
import sys
import threading
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.jobfile import job_spec
from unicron_lib.training.baseline import Fault, compute
from unicron_lib.training.effort import Effort
from unicron_lib.training.groups import choose_device
from unicron_lib.training.ledger import Entry, Ledger, ledger_directory
from unicron_lib.training.loop import Work
from unicron_lib.training.replica import Replica

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
JOIN_MS = 10_000


def serve(port: int) -> None:
    """Be the lighthouse until killed; ranks that are late for a quorum are waited for as long as torchft's README says."""
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind=f"{HOST}:{port}", min_replicas=1, join_timeout_ms=JOIN_MS)
    sys.stderr.write(f"lighthouse at {lighthouse.address()}\n")
    threading.Event().wait()


def train(spec: JobSpec, directory: Path, *, rank: int, lighthouse: int) -> None:
    """Train to the last iteration; the state comes from another rank, if there is one that has more."""
    fault, device = Fault(), choose_device(0)
    # torchft brings groups of its own; megatron does nothing without a default one
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    replica = Replica(spec, device)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = _manager(replica, rank, store, lighthouse)

    @cache
    def part(own: int, size: int) -> Work:
        return Work(spec, replica=own, num_replicas=size)

    effort = Effort()
    with Ledger(ledger_directory(directory, spec.job), generation=1, rank=rank) as ledger:
        while manager.current_step() < spec.train_iters:
            started = time.monotonic()
            manager.start_quorum()
            iteration = manager.current_step()
            compute(replica, part(manager.participating_rank(), manager.num_participants()), effort, iteration)
            time.sleep(max(0.0, spec.pace_s - (time.monotonic() - started)))
            fault.raise_if_wanted()
            manager.allreduce(replica.buffer, reduce_op=dist.ReduceOp.SUM).wait()
            if manager.should_commit():
                reduced = replica.reduced()
                replica.step(iteration)
                ledger.write(Entry(iteration=iteration, samples=reduced.samples, loss=reduced.loss))
    manager.shutdown()


def _manager(replica: Replica, rank: int, store: TCPStore, lighthouse: int) -> Any:
    torchft = importlib.import_module("torchft")
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=replica.load,
        state_dict=lambda: {name: tensor.clone() for name, tensor in replica.state().items()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=f"http://{HOST}:{lighthouse}",
        replica_id=f"rank{rank}_",
        hostname=HOST,
    )


def main() -> None:
    """Be a rank, or the lighthouse."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(description="Train a job under torchft.")
    parser.add_argument("--lighthouse", type=int, required=True, help="its port")
    parser.add_argument("--serve", action="store_true", help="be the lighthouse")
    parser.add_argument("--spec", type=Path, help="JSON file of a JobSpec")
    parser.add_argument("--dir", type=Path, help="for the ledgers")
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.lighthouse)
    torch.manual_seed(0)
    spec = job_spec.validate_json(arguments.spec.read_bytes())
    train(spec, arguments.dir, rank=arguments.rank, lighthouse=arguments.lighthouse)


if __name__ == "__main__":
    main()
