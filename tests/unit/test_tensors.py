"""Tensors in the layout of safetensors: the library reads ours, we read the library's, and nothing else gets in."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from unicron_lib.checkpointing.tensors import DTYPES, pack, unpack
from unicron_lib.errors import CheckpointError

SHAPES = [(), (0,), (3,), (2, 3), (1, 0, 4), (5, 1, 2)]


def some_tensors() -> dict[str, torch.Tensor]:
    made = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        shape = SHAPES[number % len(SHAPES)]
        made[f"{name}.x"] = torch.arange(1 + torch.Size(shape).numel())[1:].reshape(shape).to(dtype)
    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    return {name: bits(it) for name, it in one.items()} == {name: bits(it) for name, it in other.items()}


def test_every_dtype_and_shape_comes_back() -> None:
    tensors = some_tensors()
    assert same(unpack(pack(tensors), "k"), tensors)


def test_the_library_reads_ours_and_we_read_the_librarys() -> None:
    tensors = some_tensors()
    assert same(load(bytes(pack(tensors))), tensors)
    assert same(unpack(bytearray(save(tensors, metadata={"by": "others"})), "k"), tensors)


def test_what_was_packed_does_not_change_with_the_tensors() -> None:
    """A snapshot is of the moment it was taken in, not of the one it is uploaded in."""
    tensors = {"w": torch.ones(1000), "t": torch.ones(4, 6).t(), "g": torch.ones(3, requires_grad=True)}
    packed = pack(tensors)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(2.0)
    assert {name: tensor.unique().tolist() for name, tensor in unpack(packed, "k").items()} == {name: [1.0] for name in "wtg"}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_views_of_one_buffer_are_packed_as_tensors_of_their_own_are(data: st.DataObject) -> None:
    """What lies side by side is copied at once; neither order, gaps, overlaps nor strides change what is written."""
    buffer = torch.arange(24, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=6))
    parts = [*torch.split(buffer, data.draw(st.sampled_from([5, 8, 24]))), *(buffer[min(it) : max(it)] for it in cuts)]
    parts += [buffer.view(4, 6).t(), buffer[::2], torch.arange(3), *torch.split(torch.arange(9.0), 4)]
    views = dict(zip("abcdefghijklmnopqrstuvwxyz", data.draw(st.permutations(parts)), strict=False))
    assert same(unpack(pack(views), "k"), views)
    assert pack(views) == pack({name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()})


def test_memory_that_fits_is_used_again() -> None:
    memory = pack({"w": torch.ones(5)})
    assert pack({"w": torch.zeros(5)}, memory) is memory
    assert unpack(memory, "k")["w"].tolist() == [0.0] * 5
    assert unpack(pack({"w": torch.ones(6)}, memory), "k")["w"].tolist() == [1.0] * 6


def test_no_tensors_are_a_file_too() -> None:
    assert unpack(pack({}), "k") == {}


def test_tensors_that_lie_where_their_type_may_not_are_read() -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + b"\x07" + bytes(torch.tensor([2.5]).view(torch.uint8).tolist())
    assert unpack(bytearray(data), "k")["b"].tolist() == [2.5]


def a_file(header: object, *, num_bytes: int = 8, length: int | None = None) -> bytearray:
    told = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray((len(told) if length is None else length).to_bytes(8, "little") + told + bytes(num_bytes))


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    "data",
    [
        bytearray(),
        bytearray(b"\x00" * 7),
        bytearray(b"\xff" * 8),
        bytearray(b"\xff" * 100),
        a_file({"a": entry()}, length=1 << 40),
        a_file(b"not json"),
        a_file(b"[" * 100_000),
        a_file(b'{"a": {}, "a": {}}'),
        a_file([]),
        a_file({"a": 1}),
        a_file({"a": entry(more=1)}),
        a_file({"a": entry(dtype="F31")}),
        a_file({"a": entry(dtype=["F32"])}),
        a_file({"a": entry(shape=[-2])}),
        a_file({"a": entry(shape=[2.0])}),
        a_file({"a": entry(shape=[True, 2])}),
        a_file({"a": entry(shape=[1 << 62, 4], data_offsets=[0, 1 << 64])}),
        a_file({"a": entry(shape=[1 << 40], data_offsets=[0, 1 << 42])}),
        a_file({"a": entry(shape=[1] * 65 + [2])}),
        a_file({"a": entry(data_offsets=[0, 4])}),
        a_file({"a": entry(data_offsets=[4, 12])}),
        a_file({"a": entry(), "b": entry()}),
        a_file({"a": entry(), "b": entry(data_offsets=[4, 12])}, num_bytes=12),
        a_file({"a": entry(), "b": entry(data_offsets=[12, 20])}, num_bytes=20),
        a_file({"a": entry()}, num_bytes=7),
        a_file({"a": entry()}, num_bytes=9),
        a_file({}, num_bytes=1),
        a_file(b'{"a": NaN}'),
        a_file(b'{"a": ' + b"9" * 5000 + b"}"),
    ],
    ids=lambda data: str(bytes(data[8:60])),
)
def test_what_is_no_safetensors_file_is_refused(data: bytearray) -> None:
    with pytest.raises(CheckpointError, match="shard k is no safetensors file"):
        unpack(data, "k")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_that_were_changed_anywhere_give_tensors_or_one_error(data: st.DataObject) -> None:
    packed = pack({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int64)})
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(0, len(packed))) :]
    try:
        assert all(isinstance(tensor, torch.Tensor) for tensor in unpack(packed, "k").values())
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most examples raise, some need not
