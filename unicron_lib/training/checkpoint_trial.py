"""What a checkpoint costs: our snapshot beside `torch.save` and DCP's `async_save`, our transfers beside boto3's."""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from unicron_lib.adapters.s3 import S3Store
from unicron_lib.adapters.s3_yardstick import Setting, Yardstick, settings
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.tensors import pack_into, unpack
from unicron_lib.training.memory_trial import fill, restored, slots_with, training
from unicron_lib.training.shards import to_bytes
from unicron_lib.training.trial_cost import JOB, Cost, timed

BAR_BLOCKING = 0.05
BAR_COPIES = 1.01
BAR_TRANSFER = 0.9
RAW = "raw"
SAMPLE = 4
"""Which of boto3's settings is the best, that part of the state tells."""
BYTES_PER_PARAMETER = 12
"""float32, with Adam's two moments."""


def make_state(num_parameters: int) -> dict[str, torch.Tensor]:
    """Parameters and Adam's moments, in tensors as large as a transformer's."""
    size = max(1, num_parameters // 24)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return {f"{kind}.layer{layer}": torch.rand(size) for layer in range(24) for kind in kinds}


def measure(bucket: str, *, num_parameters: int, rounds: int) -> Iterator[Cost]:
    """Blocking times and transfers, each in turn, all in this process and against one server."""
    torch.set_num_threads(1)  # as ranks do: several that share a busy core wait for each other at every tensor
    state = make_state(num_parameters)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    memory = to_bytes(state)  # as a rank keeps it from one save to the next
    yield Cost(
        what="memory of a snapshot",
        value=len(memory) / 1e6,
        unit="MB",
        beside="the state",
        other=num_bytes / 1e6,
        ratio=len(memory) / num_bytes,
        bar=BAR_COPIES,
        at_most=True,
    )
    trial = _Trial(bucket, state, memory)
    with _alone(), slots_with(state) as (slot, from_peer):
        times = [trial.round(slot, from_peer) for _ in range(rounds)]
    yield from _blocking(times)
    yield restored([it.from_peer for it in times], [it.down + it.fill for it in times])
    yield _beside_boto3("upload, with SHA-256", [(it.up, it.raw_up) for it in times], trial.best_up, num_bytes)
    yield _beside_boto3("restore, verified", [(it.down, it.raw_down) for it in times], trial.best_down, num_bytes)
    del state, memory, trial, slot, from_peer
    yield from training()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one round. `raw_up` and `raw_down` are boto3's; what `torch.save` has written goes up with them."""

    save: float
    keep: float
    async_save: float
    torch_save: float
    raw_up: float
    raw_down: float
    up: float
    down: float
    fill: float
    from_peer: float

    @property
    def synchronous(self) -> float:
        """Until a state is in the store, if the training waits for that."""
        return self.torch_save + self.raw_up


class _Trial:
    """One state that is saved and restored in all ways; `best_up` and `best_down` are boto3's settings."""

    def __init__(self, bucket: str, state: dict[str, torch.Tensor], memory: bytearray) -> None:
        self._state = state
        self._memory = memory
        self._yardstick = Yardstick(bucket)
        self._repository = CheckpointRepository(S3Store(bucket, "bench"), JOB)
        self.best_up, self.best_down = self._best()

    def _best(self) -> tuple[Setting, Setting]:
        """With which a part of the state goes up, and comes down, soonest."""
        part = self._memory[: len(self._memory) // SAMPLE]
        tried = [(it, self._yardstick.upload(RAW, part, it), self._yardstick.download(RAW, it)) for it in settings()]
        return min(tried, key=lambda it: it[1])[0], min(tried, key=lambda it: it[2])[0]

    def round(self, slot: memoryview, from_peer: Callable[[], float]) -> Times:
        """All of them once."""
        save = timed(lambda: to_bytes(self._state, self._memory))
        keep = timed(lambda: pack_into(self._state, slot))
        async_save = _async_save(self._state)
        torch_save, raw_up, raw_down = self._by_boto3()
        up, down, fill = self._by_us()
        return Times(
            save=save,
            keep=keep,
            async_save=async_save,
            torch_save=torch_save,
            raw_up=raw_up,
            raw_down=raw_down,
            up=up,
            down=down,
            fill=fill,
            from_peer=from_peer(),
        )

    def _by_boto3(self) -> tuple[float, float, float]:
        started = time.perf_counter()
        file = io.BytesIO()
        torch.save(self._state, file)
        torch_save = time.perf_counter() - started
        raw_up = self._yardstick.upload(RAW, file.getvalue(), self.best_up)
        del file
        raw_down = self._yardstick.download(RAW, self.best_down)
        self._yardstick.delete(RAW)
        return torch_save, raw_up, raw_down

    def _by_us(self) -> tuple[float, float, float]:
        repository, names, data = self._repository, tuple(self._state), self._memory
        started = time.perf_counter()
        shard = repository.put_shard(iteration=0, generation=0, save="all", rank=0, data=data, tensors=names)
        sent = time.perf_counter()
        found = repository.load_shard(shard)
        loaded = time.perf_counter()
        fill(self._state, unpack(found, "store"))
        return sent - started, loaded - sent, time.perf_counter() - loaded


def _blocking(times: Sequence[Times]) -> Iterator[Cost]:
    save, keep = "training stands still", "training stands still, to keep the state in memory"
    at_once = "torch.save and upload, all synchronous"
    synchronous = [it.synchronous for it in times]
    for what, mine, beside, others, bar in (
        (save, [it.save for it in times], at_once, synchronous, BAR_BLOCKING),
        (save, [it.save for it in times], "DCP async_save, to a folder", [it.async_save for it in times], None),
        (keep, [it.keep for it in times], at_once, synchronous, BAR_BLOCKING),
    ):
        value, other = statistics.median(mine), statistics.median(others)
        yield Cost(what=what, value=value, unit="s", beside=beside, other=other, ratio=value / other, bar=bar, at_most=True)


def _async_save(state: dict[str, torch.Tensor]) -> float:
    """Seconds until the training could go on."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        saving: Any = async_save(state, checkpoint_id=folder)
        blocked_s = time.perf_counter() - started
        saving.result()
    return blocked_s


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of one: DCP will not do without."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _beside_boto3(what: str, pairs: Sequence[tuple[float, float]], best: Setting, num_bytes: int) -> Cost:
    """Round by round: what else the machine does meets both alike."""
    value, other = (num_bytes / statistics.median(times) / 1e6 for times in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    beside = f"boto3's best ({best.name})"
    return Cost(what=what, value=value, unit="MB/s", beside=beside, other=other, ratio=ratio, bar=BAR_TRANSFER)
