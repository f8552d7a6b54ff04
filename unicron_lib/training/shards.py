"""Tensors to bytes and back, by safetensors; which rank saves which tensor."""

from collections.abc import Mapping

import torch

from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.tensors import pack, unpack
from unicron_lib.errors import CheckpointError


def own_share(state: Mapping[str, torch.Tensor], *, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The tensors that a rank saves: each goes to exactly one rank, bytes balanced, largest first. Every rank gets one."""
    loads = [0] * world_size
    mine: dict[str, torch.Tensor] = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        target = loads.index(min(loads))
        loads[target] += state[name].nbytes
        if target == rank:
            mine[name] = state[name]
    return mine


def to_bytes(tensors: Mapping[str, torch.Tensor], into: bytearray | None = None) -> bytearray:
    """One safetensors file in host memory, a copy that later steps do not change; in the memory of `into` if that fits."""
    return pack(tensors, into)


def read_state(repository: CheckpointRepository, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The whole state of a checkpoint, verified shard by shard before it is used; raises CheckpointError."""
    state: dict[str, torch.Tensor] = {}
    for shard, data in zip(manifest.shards, repository.load_shards(manifest), strict=True):
        tensors = unpack(data, shard.key)
        if set(tensors) != set(shard.tensors):
            raise CheckpointError(f"shard {shard.key} holds other tensors than its manifest says")
        state |= tensors
    return state
