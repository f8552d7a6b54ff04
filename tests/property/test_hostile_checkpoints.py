"""Whoever can write to the bucket can write anything: it is refused in one sentence, and nothing else is read for it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore

from unicron_lib.checkpointing.manifest import Manifest, dump_manifest, parse_manifest, parse_shard
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError

SAVE = {"iteration": 7, "generation": 2, "save": "all"}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.integers(10**18, 10**40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
paths = st.sampled_from(
    [
        "../../etc/passwd",
        "jobs/b/shards/i0000000007-g2-all/r0.safetensors",
        "jobs/a/manifests/9999999992-9999999997.json",
        "jobs/a/shards/../../b/shards/i1-g1-all/r0.safetensors",
        "jobs/a/shards//r0.safetensors",
        "/jobs/a/shards/x/r0.safetensors",
        "journal/000000000001.json",
        "jobs/a/shards/x/r0.safetensors\x00",
        "jobs/a/shards/" + "x" * 300 + "/r0.safetensors",
    ]
)


class Watched(MemoryStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)

    def size(self, key: str) -> int:
        self.read.append(key)
        return len(super().get(key))

    def sizes(self, prefix: str) -> dict[str, int]:
        self.read.append(prefix)
        return super().sizes(prefix)


def saved() -> tuple[Watched, Manifest]:
    store = Watched()
    repository = CheckpointRepository(store, "a")
    shards = tuple(
        repository.put_shard(**SAVE, rank=rank, data=bytes([rank]) * 50, tensors=(f"param.{rank}",)) for rank in range(2)
    )
    manifest = Manifest(job="a", generation=2, iteration=7, loss=1.0, consumed_samples=8, layout=Layout(dp=2), shards=shards)
    repository.commit(manifest)
    store.put("jobs/b/shards/i0000000007-g2-all/r0.safetensors", b"another job's")
    return store, manifest


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for name, it in inner for place in places(it, (*at, name)))]


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A manifest with something else in one or two places, or something added."""
    value = json.loads(dump_manifest(saved()[1]))
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = draw(st.sampled_from([place for place in places(value) if place]))
        inside = value
        for name in outer:
            inside = inside[name]
        if isinstance(inside, dict) and draw(st.booleans()):
            last = draw(st.sampled_from(["unknown", "__class__", *inside]))
        inside[last] = draw(anything | paths)
    return json.dumps(value).encode()


@settings(max_examples=300, deadline=None)
@given(changed() | st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_a_hostile_manifest_is_refused_or_stays_within_its_job(data: bytes) -> None:
    store, manifest = saved()
    store.put(manifest.key, data)
    store.read.clear()
    repository = CheckpointRepository(store, "a")
    found, skipped = repository.newest_complete()
    assert bool(found) != bool(skipped)
    if found:
        for _ in range(1):
            try:
                assert all(isinstance(shard, bytearray) for shard in repository.load_shards(found, limit_bytes=1000))
            except CheckpointError:
                break
    assert all(key.startswith("jobs/a/") for key in store.read)
    assert all("\n" not in reason for reason in skipped)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100) | changed() | anything.map(lambda value: json.dumps(value).encode()))
def test_parsing_raises_nothing_but_a_checkpoint_error(data: bytes) -> None:
    for parse in (parse_manifest, parse_shard):
        try:
            parse(data)
        except CheckpointError as error:
            assert len(str(error)) < 1000  # noqa: PT017 - what parses is fine


def test_deep_and_long_manifests_are_refused() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b'{"iteration": ' + b"9" * 100_000 + b"}", b"\xff" * 1000):
        with pytest.raises(CheckpointError, match="the manifest is damaged"):
            parse_manifest(data)


@pytest.mark.parametrize("segment", ["x" * 181, "x" * 300])
def test_a_key_that_no_store_would_take_is_refused(segment: str) -> None:
    store, manifest = saved()
    claims = json.loads(dump_manifest(manifest))
    claims["shards"][1]["key"] = f"jobs/a/shards/{segment}/r0.safetensors"
    store.put(manifest.key, json.dumps(claims).encode())
    found, skipped = CheckpointRepository(store, "a").newest_complete()
    assert found is None
    assert "shards outside the job's own keys" in skipped[0]


@pytest.mark.parametrize("num_bytes", [51, 1 << 40, 1 << 59])
def test_no_memory_is_taken_for_bytes_that_are_not_there(num_bytes: int) -> None:
    store, manifest = saved()
    claims = json.loads(dump_manifest(manifest))
    claims["shards"][0]["num_bytes"] = num_bytes
    store.put(manifest.key, json.dumps(claims).encode())
    repository = CheckpointRepository(store, "a")
    assert repository.newest_complete()[0] is None
    with pytest.raises(CheckpointError, match=f"it has 50 of {num_bytes} bytes"):
        next(repository.load_shards(repository.load_manifest(manifest.key)))


def test_more_than_the_job_can_need_is_not_read() -> None:
    store, manifest = saved()
    store.read.clear()
    with pytest.raises(CheckpointError, match="has 100 bytes, the job's state at most 99"):
        next(CheckpointRepository(store, "a").load_shards(manifest, limit_bytes=99))
    assert store.read == []
