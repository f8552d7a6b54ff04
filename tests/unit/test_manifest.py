"""Manifests come from a store that others can write: whatever is no manifest is refused in one sentence."""

import json
from dataclasses import replace

import pytest

from unicron_lib.checkpointing.manifest import (
    Manifest,
    Shard,
    dump_manifest,
    dump_shard,
    parse_key,
    parse_manifest,
    parse_shard,
)
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError

SHARD = Shard(key="jobs/a/shards/i0000000007-g2-all/r0.safetensors", num_bytes=10, sha256="0" * 64, tensors=("param.w",))
MANIFEST = Manifest(job="a", generation=2, iteration=7, loss=1.5, consumed_samples=64, layout=Layout(dp=1), shards=(SHARD,))
HALVES = tuple(
    replace(
        SHARD,
        key=f"jobs/a/shards/i0000000007-g2-all/r{rank}.safetensors",
        slices={"param.w": TensorSlice.part_of((4, 3), dim=0, number=rank, of=2)},
    )
    for rank in range(2)
)
SLICED = replace(MANIFEST, layout=Layout(tp=2), shards=HALVES, format=2)


def hostile(**changes) -> bytes:
    return json.dumps(json.loads(dump_manifest(MANIFEST)) | changes).encode()


def hostile_shard(**changes) -> bytes:
    shard = json.loads(dump_manifest(MANIFEST))["shards"][0] | changes
    return hostile(shards=[shard])


def test_a_manifest_comes_back_as_it_was() -> None:
    assert parse_manifest(dump_manifest(MANIFEST)) == MANIFEST
    assert parse_key("a", MANIFEST.key) == (7, 2)


def test_slices_come_back_as_they_were_and_whole_tensors_are_told_as_ever() -> None:
    assert parse_manifest(dump_manifest(SLICED)) == SLICED
    assert b"slices" not in dump_manifest(MANIFEST)
    assert [parse_shard(dump_shard(shard)) for shard in (SHARD, *HALVES)] == [SHARD, *HALVES]
    assert b"slices" not in dump_shard(SHARD)


def hostile_slices(*slices: dict) -> bytes:
    claims = json.loads(dump_manifest(SLICED))
    for shard, piece in zip(claims["shards"], slices, strict=True):
        shard["slices"] = piece
    return json.dumps(claims).encode()


def a_slice(offset: list, size: list, whole: list) -> dict:
    return {"param.w": {"offset": offset, "size": size, "whole": whole}}


UPPER = a_slice([0, 0], [2, 3], [4, 3])


@pytest.mark.parametrize(
    "lower",
    [
        {},
        UPPER,
        a_slice([1, 0], [3, 3], [4, 3]),
        a_slice([2, 0], [3, 3], [4, 3]),
        a_slice([2, 0], [2, 3], [5, 3]),
        a_slice([-2, 0], [2, 3], [4, 3]),
        a_slice([2, 0], [0, 3], [4, 3]),
        a_slice([2], [2], [4]),
        a_slice([2, 0, 0], [2, 3], [4, 3]),
        a_slice([2, 1], [2, 2], [4, 3]),
        a_slice([1 << 60, 0], [1 << 60, 3], [1 << 62, 3]),
        a_slice([2, 0], ["2", 3], [4, 3]),
        {"param.w": UPPER["param.w"] | {"unknown": 1}},
        {"param.v": UPPER["param.w"]},
        a_slice([2, 0], [2, 3], [4, 3]) | {"param.v": UPPER["param.w"]},
    ],
)
def test_slices_that_cannot_be_are_refused(lower: dict) -> None:
    with pytest.raises(CheckpointError, match=r"^the manifest is damaged: "):
        parse_manifest(hostile_slices(UPPER, lower))


def test_a_format_and_its_slices_go_together() -> None:
    untold = dump_manifest(SLICED).replace(b'"format": 2', b'"format": 1')
    for wrong in (hostile(format=2), hostile_shard(slices=UPPER), untold):
        with pytest.raises(CheckpointError, match="format 2 says of every tensor where it lies"):
            parse_manifest(wrong)


def test_newer_checkpoints_have_smaller_keys() -> None:
    def key(iteration: int, generation: int) -> str:
        return parse_manifest(hostile(iteration=iteration, generation=generation)).key

    assert key(10, 3) < key(10, 2) < key(9, 9) < key(2, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"\x80\x04K\x01.",
        dump_manifest(MANIFEST)[:-20],
        hostile(format=0),
        hostile(job="../a"),
        hostile(job="b"),
        hostile(iteration="7"),
        hostile(iteration=-1),
        hostile(generation=1.5),
        hostile(consumed_samples=None),
        hostile(loss="NaN"),
        hostile(shards=[]),
        hostile(shards=[json.loads(dump_manifest(MANIFEST))["shards"][0]] * 2),
        hostile(unknown=1),
        hostile(iteration=10**10),
        hostile(generation=10**30),
        hostile(layout={"tp": 0, "pp": 1, "dp": 1}),
        hostile(layout={"tp": "1", "pp": 1, "dp": 1}),
        hostile(layout={"tp": 1, "pp": 1, "dp": 1, "unknown": 1}),
        hostile(loss=float("nan")),
        hostile(committed_at=float("inf")),
        hostile(committed_at=1e12),
        hostile(upload_s=-1.0),
        hostile_shard(num_bytes=1 << 61),
        hostile_shard(key="jobs/b/shards/i1-g1-all/r0.safetensors"),
        hostile_shard(key="jobs/a/shards/../../b/r0.safetensors"),
        hostile_shard(key="/etc/passwd"),
        hostile_shard(key="jobs/a/shards/x/r0.safetensors\n"),
        hostile_shard(num_bytes=0),
        hostile_shard(num_bytes=True),
        hostile_shard(sha256="0" * 63),
        hostile_shard(tensors=[]),
        hostile_shard(tensors=["../w"]),
        hostile_shard(tensors="param.w"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^the manifest is damaged: ") as caught:
        parse_manifest(data)
    assert "\n" not in str(caught.value)


def test_a_later_format_is_told_apart_from_damage() -> None:
    """So that nobody condemns it who merely runs an older version."""
    with pytest.raises(CheckpointError, match="written by a later version of Unicron: its format is 3, at most 2"):
        parse_manifest(hostile(format=3))


@pytest.mark.parametrize("key", ["", "jobs/b/manifests/0000000001-0000000001.json", "jobs/a/manifests/1-1.json", "../x"])
def test_keys_of_other_things_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint of job a"):
        parse_key("a", key)
