"""What a checkpoint costs: our snapshot beside `torch.save` and DCP's `async_save`, our transfers beside boto3's."""

import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from unicron_lib.adapters.s3 import S3Store
from unicron_lib.adapters.s3_yardstick import Yardstick, settings
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.tensors import pack_into, unpack
from unicron_lib.training.memory_trial import restoring, slot_for, training
from unicron_lib.training.shards import to_bytes
from unicron_lib.training.trial_cost import JOB, Cost, timed

BAR_BLOCKING = 0.05
BAR_COPIES = 1.01
BAR_TRANSFER = 0.9
BYTES_PER_PARAMETER = 12
"""float32, with Adam's two moments."""


def make_state(num_parameters: int) -> dict[str, torch.Tensor]:
    """Parameters and Adam's moments, in tensors as large as a transformer's."""
    size = max(1, num_parameters // 24)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return {f"{kind}.layer{layer}": torch.rand(size) for layer in range(24) for kind in kinds}


def measure(bucket: str, *, num_parameters: int, rounds: int) -> Iterator[Cost]:
    """Blocking times, then transfers, all in this process and against one server."""
    torch.set_num_threads(1)  # as ranks do: several that share a busy core wait for each other at every tensor
    state = make_state(num_parameters)
    yardstick = Yardstick(bucket)
    yield from _blocking(state, yardstick, rounds)
    data = to_bytes(state)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    yield Cost(
        what="memory of a snapshot",
        value=len(data) / 1e6,
        unit="MB",
        beside="the state",
        other=num_bytes / 1e6,
        ratio=len(data) / num_bytes,
        bar=BAR_COPIES,
        at_most=True,
    )
    yield from restoring(bucket, state, rounds)
    del state
    yield from _transfers(bucket, data, yardstick, rounds)
    del data
    yield from training()


def _blocking(state: dict[str, torch.Tensor], yardstick: Yardstick, rounds: int) -> Iterator[Cost]:
    ours, slots, synchronous, others = [], [], [], []
    memory = to_bytes(state)  # as a rank keeps it from one save to the next
    with _alone(), slot_for(state) as slot:
        for _ in range(rounds):
            ours.append(timed(lambda: to_bytes(state, memory)))
            slots.append(timed(lambda: pack_into(state, slot)))
            synchronous.append(timed(lambda: _save_at_once(state, yardstick)))
            others.append(_async_save(state))
    save, keep = "training stands still", "training stands still, to keep the state in memory"
    at_once = "torch.save and upload, all synchronous"
    for what, mine, beside, times, bar in (
        (save, ours, at_once, synchronous, BAR_BLOCKING),
        (save, ours, "DCP async_save, to a folder", others, None),
        (keep, slots, at_once, synchronous, BAR_BLOCKING),
    ):
        value, other = statistics.median(mine), statistics.median(times)
        yield Cost(what=what, value=value, unit="s", beside=beside, other=other, ratio=value / other, bar=bar, at_most=True)


def _save_at_once(state: dict[str, torch.Tensor], yardstick: Yardstick) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    default = next(settings())
    yardstick.upload("synchronous", file.getvalue(), default)
    yardstick.delete("synchronous")


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


def _transfers(bucket: str, data: bytearray, yardstick: Yardstick, rounds: int) -> Iterator[Cost]:
    repository = CheckpointRepository(S3Store(bucket, "bench"), JOB)
    names = tuple(unpack(data, "bench"))
    up, down = list[float](), list[float]()
    raw_up: dict[str, list[float]] = {}
    raw_down: dict[str, list[float]] = {}
    for _ in range(rounds):
        started = time.perf_counter()
        shard = repository.put_shard(iteration=0, generation=0, save="all", rank=0, data=data, tensors=names)
        up.append(time.perf_counter() - started)
        down.append(timed(lambda shard=shard: repository.load_shard(shard)))  # type: ignore[misc]
        for setting in settings():
            raw_up.setdefault(setting.name, []).append(yardstick.upload("raw", data, setting))
            raw_down.setdefault(setting.name, []).append(yardstick.download("raw", setting))
    for what, mine, raw in (("upload, with SHA-256", up, raw_up), ("restore, verified", down, raw_down)):
        yield _beside_boto3(what, mine, raw, len(data))


def _beside_boto3(what: str, mine: list[float], raw: dict[str, list[float]], num_bytes: int) -> Cost:
    """Beside the setting that is best as a rule, round by round: what else the machine does meets both alike."""
    name = min(raw, key=lambda name: statistics.median(raw[name]))
    value, other = (num_bytes / statistics.median(times) / 1e6 for times in (mine, raw[name]))
    ratio = statistics.median(theirs / ours for theirs, ours in zip(raw[name], mine, strict=True))
    beside = f"boto3's best ({name})"
    return Cost(what=what, value=value, unit="MB/s", beside=beside, other=other, ratio=ratio, bar=BAR_TRANSFER)
