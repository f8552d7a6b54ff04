"""The ranks of a generation: how they find each other, sum gradients, and part."""

import gc
import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from unicron_lib.training.environment import RankEnvironment

STORE_TIMEOUT_S = 60.0
"""For calls of the rendezvous store."""


class CollectiveFailed(Exception):
    """A peer is gone or out of reach. Holds words only: a traceback would keep the broken group's sockets open."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class Bulletin:
    """Short notices between the ranks of a generation, by its rendezvous store, which outlives any rank."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, name: str, value: str) -> None:
        """Tell the others; raises CollectiveFailed when the store is gone."""
        try:
            self._store.set(name, value)
        except RuntimeError as error:
            raise CollectiveFailed(type(error).__name__, str(error)) from None

    def read(self, name: str, *, timeout_s: float) -> str | None:
        """Wait for a notice, None if it does not come in time; raises CollectiveFailed when the store is gone."""
        try:
            self._store.wait([name], timedelta(seconds=timeout_s))
            return str(self._store.get(name).decode())
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise CollectiveFailed(type(error).__name__, str(error)) from None


def choose_device(local_rank: int) -> torch.device:
    """The rank's GPU, or the CPU with one thread: ranks share the cores."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def join(env: RankEnvironment, device: torch.device) -> Bulletin:
    """Meet the other ranks of the generation and form the process group; raises CollectiveFailed.

    gloo cannot be aborted: whoever waits for a stopped peer waits as long as the job's `distributed_timeout_minutes`, unless
    the agent kills the peer.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(env.master_addr))
    # 2: abort what hangs but leave the process alone, which has a state to save
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    prefix = f"{env.job}/g{env.generation}"
    try:
        stores = [_connect(env) for _ in range(2)]  # a store's client serves one waiting call at a time
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"{prefix}/groups", stores[0]),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(minutes=env.spec.distributed_timeout_minutes),
        )
    except RuntimeError as error:
        raise CollectiveFailed(type(error).__name__, str(error)) from None
    return Bulletin(PrefixStore(f"{prefix}/bulletin", stores[1]))


def finish_own_work(device: torch.device) -> None:
    """Wait until the rank's GPU has done all that it was asked for: what comes next is waiting for others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sum_over_ranks(buffer: torch.Tensor) -> None:
    """All-reduce `buffer` in place; raises CollectiveFailed, and then its content is worthless."""
    try:
        dist.all_reduce(buffer)
    except RuntimeError as error:
        raise CollectiveFailed(type(error).__name__, str(error)) from None


def leave() -> None:
    """Close the groups' connections, so that peers that still wait for us see it. Call it outside of `except` blocks."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def interface_towards(address: str) -> str:
    """The network interface from which `address` is reached: gloo's own guess is often another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return name
    return "lo"


def _connect(env: RankEnvironment) -> TCPStore:
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout)
