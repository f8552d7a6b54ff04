"""Tensors in one piece of memory, in the layout of a safetensors file: copied once when packed, not at all when unpacked.

An 8-byte length, a JSON header with each tensor's dtype, shape and place, then the bytes. What comes from a store is
checked before any of it is used: a header says nothing about memory that is not there.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from unicron_lib.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000
MAX_DIMENSIONS = 64


def packed_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """How much memory `pack_into` fills."""
    begin, spans = _laid_out(tensors)
    return begin + sum(last - first for first, last in spans.values())


def pack(tensors: Mapping[str, torch.Tensor], into: bytearray | None = None) -> bytearray:
    """The tensors as they are now, wherever they are, as a safetensors file: the one copy of a snapshot.

    In the memory of `into`, if it has the right size: fresh memory costs several times as much as the copying.
    """
    size = packed_bytes(tensors)
    packed = into if into is not None and len(into) == size else bytearray(size)
    pack_into(tensors, memoryview(packed))
    return packed


def pack_into(tensors: Mapping[str, torch.Tensor], packed: memoryview) -> None:
    """Fill memory of the size that `packed_bytes` tells with the tensors as they are now, as a safetensors file."""
    begin, spans = _laid_out(tensors)
    packed[:begin] = _header_of(tensors, spans)
    memory, at = torch.frombuffer(packed, dtype=torch.uint8), begin
    for piece in _pieces(tensors[name] for name in spans):
        room = memory[at : at + piece.nbytes]
        at += piece.nbytes
        if piece.device.type == "cpu" and piece.is_contiguous():
            # the C library's copy of one large block leaves the caches alone: up to twice as fast as torch's
            np.copyto(room.numpy(), piece.view(-1).view(torch.uint8).numpy())
        else:
            room.view(piece.dtype).view(piece.shape).copy_(piece)


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What is copied at a time: those that lie side by side, as views of one buffer may, are one piece of bytes."""
    run: list[torch.Tensor] = []
    for tensor in tensors:
        if run and not _follows(tensor, run[-1]):
            yield _joined(run)
            run = []
        if tensor.numel():
            run.append(tensor.detach())
    if run:
        yield _joined(run)


def _follows(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether it begins where the other one ends."""
    is_same = tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    is_solid = tensor.is_contiguous() and before.is_contiguous()
    return is_same and is_solid and tensor.data_ptr() == before.data_ptr() + before.nbytes


def _joined(run: list[torch.Tensor]) -> torch.Tensor:
    first, storage = run[0], run[0].untyped_storage()
    if len(run) == 1:
        return first
    joined = torch.empty(0, dtype=torch.uint8, device=first.device)
    return joined.set_(storage, first.data_ptr() - storage.data_ptr(), (sum(tensor.nbytes for tensor in run),), (1,))


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the tensors begin, and each one's place behind that: the widest first, then each lies where its type may lie.

    Otherwise in their own order, in which they may lie side by side already.
    """
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        spans[name] = (at, at + tensor.nbytes)
        at += tensor.nbytes
    return len(_header_of(tensors, spans)), spans


def _header_of(tensors: Mapping[str, torch.Tensor], spans: Mapping[str, tuple[int, int]]) -> bytes:
    header = {
        name: {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": span}
        for name, span in spans.items()
    }
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    return len(told).to_bytes(8, "little") + told


def unpack(data: bytearray | memoryview, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, as views of `data`; raises CheckpointError if it is none.

    `key` names it in errors. Names that are there twice, overlaps, gaps and other sizes are refused.
    """
    header, begin = _header(data, key)
    memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    entries = sorted(((*_checked(name, entry, key), name) for name, entry in header.items()), key=lambda entry: entry[2:4])
    at = 0
    tensors: dict[str, torch.Tensor] = {}
    for dtype, shape, first, last, name in entries:
        if first != at:
            raise CheckpointError(f"shard {key} is no safetensors file: {name[:80]!r} does not begin where another ends")
        at = last
        if begin + last > len(data):
            break
        tensors[name] = _view(memory[begin + first : begin + last], dtype, shape)
    if begin + at != len(data):
        raise CheckpointError(f"shard {key} is no safetensors file: its tensors have {at} of {len(data) - begin} bytes")
    return tensors


def _view(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memory.numel():
        return torch.empty(shape, dtype=dtype)
    is_aligned = memory.storage_offset() % dtype.itemsize == 0
    return (memory if is_aligned else memory.clone()).view(dtype).view(shape)


def _header(data: bytearray | memoryview, key: str) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LONGEST_HEADER, len(data) - 8):
        raise CheckpointError(f"shard {key} is no safetensors file: {len(data)} bytes with a header of {length}")
    try:
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"shard {key} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"shard {key} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _checked(name: str, entry: Any, key: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, begin and end of a tensor whose size fits them."""
    match entry:
        case {"dtype": str(told), "shape": list(shape), "data_offsets": [first, last]} if len(entry) == 3:
            numbers = [*shape, first, last]
            dtype = DTYPES.get(told)
            if (
                dtype is not None
                and len(shape) <= MAX_DIMENSIONS
                and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
                and last - first == math.prod(shape) * dtype.itemsize
            ):
                return dtype, tuple(shape), first, last
    raise CheckpointError(f"shard {key} is no safetensors file: what it says of {name[:80]!r} cannot be")
