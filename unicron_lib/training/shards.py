"""Tensors to bytes and back, by safetensors; which rank saves which tensor, and which shards a rank reads."""

from collections.abc import Iterable, Mapping

import torch

from unicron_lib.checkpointing.manifest import Manifest, Shard
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.checkpointing.tensors import pack, unpack
from unicron_lib.errors import CheckpointError, UserError

State = dict[str, torch.Tensor]
Slices = Mapping[str, TensorSlice]


def own_share(state: Mapping[str, torch.Tensor], *, rank: int, world_size: int) -> State:
    """The tensors that a rank saves: each goes to exactly one rank, bytes balanced, largest first. Every rank gets one."""
    loads = [0] * world_size
    mine: State = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        target = loads.index(min(loads))
        loads[target] += state[name].nbytes
        if target == rank:
            mine[name] = state[name]
    return mine


def to_bytes(tensors: Mapping[str, torch.Tensor], into: bytearray | None = None) -> bytearray:
    """One safetensors file in host memory, a copy that later steps do not change; in the memory of `into` if that fits."""
    return pack(tensors, into)


def read_state(repository: CheckpointRepository, manifest: Manifest) -> State:
    """Every tensor of a checkpoint, whole, verified shard by shard before it is used; raises CheckpointError."""
    if manifest.format > 1:
        pieces = (shard.slices.items() for shard in manifest.shards)
        return read_slices(repository, manifest, {name: TensorSlice.all_of(it.whole) for those in pieces for name, it in those})
    state: State = {}
    for shard in manifest.shards:
        state |= _tensors_of(repository, shard)
    return state


def read_slices(repository: CheckpointRepository, manifest: Manifest, wanted: Mapping[str, TensorSlice]) -> State:
    """The wanted parts of a checkpoint's tensors, from the shards that have some of them, one after another.

    A part that is in a shard as it is wanted is not copied. Raises CheckpointError if a shard is damaged, or something is
    missing, and UserError if a tensor has another shape: then the checkpoint is another model's.
    """
    shards = ((_tensors_of(repository, shard), shard.slices) for shard in needed(manifest.shards, wanted))
    return put_together(shards, wanted, manifest.key)


def put_together(pieces: Iterable[tuple[State, Slices]], wanted: Slices, whence: str) -> State:
    """The wanted parts of tensors, from `pieces` of them that are apart; what a piece tells no slice of, it has whole.

    Raises as `read_slices` does, whose manifest's key is a name for `whence` they are.
    """
    state: State = {}
    lacking = {name: piece.num_elements for name, piece in wanted.items()}
    for tensors, slices in pieces:
        for name in tensors.keys() & wanted.keys():
            held = slices.get(name) or TensorSlice.all_of(tensors[name].shape)
            lacking[name] -= _take(state, name, wanted[name], tensors[name], held)
    missing = sorted(name for name, count in lacking.items() if count)
    if missing:
        raise CheckpointError(f"{whence} lacks {len(missing)} tensors or parts of them, the first is {missing[0]}")
    return state


def _take(state: State, name: str, wanted: TensorSlice, tensor: torch.Tensor, held: TensorSlice) -> int:
    """Put what a shard's tensor has of a wanted one into the state; returns how many elements that is."""
    if held.whole != wanted.whole:
        raise UserError(
            f"the checkpoint is of another model: {name} has the shape {held.whole}, not {wanted.whole}: "
            "give the job another name, or leave `load` out"
        )
    common = wanted.meet(held)
    if common is None:
        return 0
    if held == wanted:
        state[name] = tensor
    else:
        into = state.setdefault(name, torch.empty(wanted.size, dtype=tensor.dtype))
        into[common.within(wanted)] = tensor[common.within(held)]
    return common.num_elements


def needed(shards: Iterable[Shard], wanted: Mapping[str, TensorSlice]) -> tuple[Shard, ...]:
    """The shards that have something of what is wanted."""
    return tuple(shard for shard in shards if any(_has(shard, name, wanted[name]) for name in shard.tensors if name in wanted))


def _has(shard: Shard, name: str, wanted: TensorSlice) -> bool:
    held = shard.slices.get(name)
    return held is None or held.whole != wanted.whole or wanted.meet(held) is not None


def _tensors_of(repository: CheckpointRepository, shard: Shard) -> State:
    tensors = unpack(repository.load_shard(shard), shard.key)
    if set(tensors) != set(shard.tensors):
        raise CheckpointError(f"shard {shard.key} holds other tensors than its manifest says")
    if any(tuple(tensors[name].shape) != piece.size for name, piece in shard.slices.items()):
        raise CheckpointError(f"shard {shard.key} holds tensors of other shapes than its manifest says")
    return tensors
