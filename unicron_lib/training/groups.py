"""The ranks of a generation: how they find each other, what they do together, and how they part."""

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from unicron_lib.domain.plans import Layout
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.peers import Alone, CollectiveFailed, Parked, Peers

STORE_TIMEOUT_S = 60.0
"""For calls of the rendezvous store."""
REACH_S, RETRY_S = 1.0, 0.1
ATTEMPTS_S = (2.0, 10.0, 60.0)
"""For one attempt to become its client: nothing but its end breaks it off, and torch asks the DNS for names on the way."""

LOOK_S, GIVE_UP_S = 0.2, 2.0
"""Once a rank is to park, all its connections are broken every 50 ms: one that has not ended so long after never will.

Until it is sure that nothing is written into its tensor any more, nobody may use that.
"""
ANSWER = 1
"""The tag of a rank's word that it has received something."""


_left_behind: list[tuple[dist.ProcessGroup, ...]] = []
"""Groups in which a collective never ends: they live as long as the process, for their end would wait for it."""


class Bulletin:
    """Short notices between the ranks of a generation, by its rendezvous store, which outlives any rank."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, name: str, value: str) -> None:
        """Tell the others; raises CollectiveFailed when the store is gone."""
        with _failing():
            self._store.set(name, value)

    def read(self, name: str, *, timeout_s: float) -> str | None:
        """Wait for a notice, None if it does not come in time; raises CollectiveFailed when the store is gone."""
        with _failing():
            try:
                self._store.wait([name], timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                return None
            return str(self._store.get(name).decode())


class TorchPeers:
    """The ranks of a process group, torch's default one if no other is given: gloo, and NCCL for what is on a GPU.

    Fails once `is_given_up`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_given_up: Callable[[], bool] = lambda: False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = device
        self._is_given_up = is_given_up
        self._group = group
        self._under_way: dict[int, list[dist.Work | None]] = {}
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, tensor: torch.Tensor) -> None:
        """All-reduce `tensor` in place; raises CollectiveFailed, and then its content is worthless."""
        with self._done():
            self._end(dist.all_reduce(tensor, group=self._group, async_op=tensor.device.type == "cpu"))

    def exchange(self, mine: bytes) -> list[bytes]:
        """All-gather of bytes, in host memory; raises CollectiveFailed."""
        with _failing():
            sizes = self._gather(torch.tensor([len(mine)]))
            longest = max(int(size) for size in sizes)
            padded = torch.frombuffer(bytearray(mine.ljust(longest + 1, b"\0")), dtype=torch.uint8)
            found = self._gather(padded)
        return [data.numpy().tobytes()[: int(size)] for size, data in zip(sizes, found, strict=True)]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Give `tensor` to a rank; raises CollectiveFailed."""
        self._trade(tensor, None, to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with what `source` sends; raises CollectiveFailed, and then its content is worthless."""
        self._trade(None, tensor, source)

    def swap(self, give: torch.Tensor, take: torch.Tensor, other: int) -> None:
        """Give and fill at once; raises CollectiveFailed, and then the content of `take` is worthless."""
        self._trade(give, take, other)

    def _trade(self, give: torch.Tensor | None, take: torch.Tensor | None, other: int) -> None:
        with self._done():
            if self._device.type == "cuda":
                wanted = ((dist.isend, give), (dist.irecv, take))
                ops = [dist.P2POp(op, it, group=self._group, group_peer=other) for op, it in wanted if it is not None]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            else:
                self._trade_and_answer(give, take, other)

    def _trade_and_answer(self, give: torch.Tensor | None, take: torch.Tensor | None, other: int) -> None:
        """Over gloo, whose wait for the end of a send may never end when the connection does: the other one tells of it.

        A send that nobody waits for is kept until a later answer of the same rank says that it is over.
        """
        under_way = [dist.isend(give, group=self._group, group_dst=other)] if give is not None else []
        if take is not None:
            dist.recv(take, group=self._group, group_src=other)
            under_way.append(dist.isend(torch.zeros(1), group=self._group, group_dst=other, tag=ANSWER))
        if give is not None:
            dist.recv(torch.empty(1), group=self._group, group_src=other, tag=ANSWER)
        self._under_way[other] = under_way

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._end(dist.all_gather(found, mine, group=self._group, async_op=True))
        return found

    def _end(self, work: dist.Work | None) -> None:
        """Wait for a collective of gloo, if there is one.

        Its wait for the end of a send may never end when the connection does: such a collective is left behind, with its group.
        """
        given_up_at = float("inf")
        while work is not None:
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # after all it may have ended well
                    return
            else:
                return
            if self._is_given_up():
                given_up_at = min(given_up_at, time.monotonic())
            if time.monotonic() - given_up_at >= GIVE_UP_S:
                _left_behind.append(_all_groups())
                raise CollectiveFailed("DistBackendError", "the collective was broken off, and gloo still waits for its end")

    @contextmanager
    def _done(self) -> Iterator[None]:
        """NCCL only enqueues: its work is done once the GPU is through with it, which says nothing of an abort."""
        with _failing():
            yield
            finish_own_work(self._device)
        if self._device.type == "cuda" and self._is_given_up():
            raise CollectiveFailed("DistBackendError", "the collective was aborted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The ranks of a generation, together: all of them, and those with the same place in their replicas.

    `line` are the ranks of this one's stage that have the other slices of its tensors, `replica` are the ranks of its replica.
    """

    peers: Peers
    column: Peers
    line: Peers
    replica: Peers
    bulletin: Bulletin


def choose_device(local_rank: int) -> torch.device:
    """The rank's GPU, or the CPU with one thread: ranks share the cores."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def join(env: RankEnvironment, device: torch.device, *, is_given_up: Callable[[], bool] = lambda: False) -> Meeting:
    """Meet the other ranks of the generation and form the process group.

    Raises CollectiveFailed, also when the process's connections are broken meanwhile, and Parked once `is_given_up`.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(env.master_addr))
    # 2: abort what hangs but leave the process alone, which has a state to save
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    prefix = f"{env.job}/g{env.generation}"
    with _failing():
        stores = [_connect(env, is_given_up) for _ in range(2)]  # a store's client serves one waiting call at a time
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"{prefix}/groups", stores[0]),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(minutes=env.spec.distributed_timeout_minutes),
        )
        bulletin = Bulletin(PrefixStore(f"{prefix}/bulletin", stores[1]))
        return Meeting(bulletin=bulletin, **_gather_around(env, device, is_given_up))


def _gather_around(env: RankEnvironment, device: torch.device, is_given_up: Callable[[], bool]) -> dict[str, Peers]:
    """The rank's groups, by the names that `Meeting` has for them. Those that are of the same ranks are one."""
    everybody = tuple(range(env.world_size))
    made: dict[tuple[int, ...], Peers] = {everybody: TorchPeers(device, is_given_up=is_given_up)}
    wanted = {"peers": everybody} | members_of(env.layout, env.rank)
    for members in wanted.values():
        if members not in made and len(members) == 1:
            made[members] = Alone()
        elif members not in made:
            group = dist.new_group(list(members), use_local_synchronization=True)
            made[members] = TorchPeers(device, is_given_up=is_given_up, group=group)
    return {name: made[members] for name, members in wanted.items()}


def members_of(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Who is in a rank's groups, by the names that `Meeting` has for them."""
    place = layout.place(rank)
    first = rank - rank % layout.replica_size
    stage = first + place.pp * layout.tp
    return {
        "column": tuple(range(rank % layout.replica_size, layout.num_gpus, layout.replica_size)),
        "line": tuple(range(stage, stage + layout.tp)),
        "replica": tuple(range(first, first + layout.replica_size)),
    }


def finish_own_work(device: torch.device) -> None:
    """Wait until the rank's GPU has done all that it was asked for: what comes next is waiting for others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def abort_groups() -> None:
    """From another thread, have what waits for NCCL's communicators fail. gloo's groups end with their connections."""
    if torch.cuda.is_available() and dist.is_initialized():
        with suppress(RuntimeError, AssertionError):  # the main thread may be leaving the group by itself
            for group in _all_groups():
                group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - nor to one backend


def _all_groups() -> tuple[dist.ProcessGroup, ...]:
    return tuple(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no other way to them


def leave() -> None:
    """Close the groups' connections, so that peers that still wait for us see it. Call it outside of `except` blocks."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's names for groups count the attempts: ranks that have made more than others would never find each other again
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - as destroy_process_group does, but for failed attempts, too
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


@contextmanager
def _failing() -> Iterator[None]:
    """What torch raises becomes CollectiveFailed, which keeps no group alive, but for errors of the rank's own device."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise CollectiveFailed(type(error).__name__, str(error)) from None


def _connect(env: RankEnvironment, is_given_up: Callable[[], bool]) -> TCPStore:
    """A client of the generation's store. torch tries again and again whatever is broken, and hears nobody meanwhile."""
    _until_reachable(env, is_given_up)
    for timeout_s in ATTEMPTS_S:
        _refuse_if(is_given_up())
        try:
            store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except dist.DistError:
            if timeout_s == ATTEMPTS_S[-1]:
                raise
        else:
            store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
            return store
    raise AssertionError("the last attempt returns or raises")


def _until_reachable(env: RankEnvironment, is_given_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STORE_TIMEOUT_S
    while True:
        _refuse_if(is_given_up())
        try:
            socket.create_connection((env.master_addr, env.master_port), timeout=REACH_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{env.master_addr}:{env.master_port}"
                raise CollectiveFailed(type(error).__name__, f"the rendezvous store at {where} is out of reach") from None
            time.sleep(RETRY_S)
        else:
            return


def _refuse_if(given_up: bool) -> None:  # noqa: FBT001 - it reads as a sentence
    if given_up:
        raise Parked("the rank was told to park before it had met the others")
