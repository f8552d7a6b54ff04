"""What every object store must do; S3 (by a local server), the directory and the tests' own pass the same tests."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from memory_store import MemoryStore
from moto.server import ThreadedMotoServer

from unicron_lib.adapters.s3 import S3Store
from unicron_lib.adapters.stores import check_store, create_store, open_store
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import ObjectNotFound, StoreError, UserError

PART = 5 << 20
"""The smallest that S3 takes."""
STRANGE_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".hidden", "a b", "a\nb", "ä", "a\\b", "a%2e", "x" * 1000]


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "file":
        url = (tmp_path / "store").as_uri()
        create_store(url)
        return open_store(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"bucket-{abs(hash(str(tmp_path)))}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return S3Store(bucket, "some/prefix", part_bytes=PART, range_bytes=PART)


def test_what_is_put_can_be_read(store: ObjectStore) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("empty", b"")
    assert (store.get("a/b"), store.size("a/b"), store.get("empty"), store.size("empty")) == (b"two", 3, b"", 0)


def test_every_process_gets_the_same_store_by_its_url(store: ObjectStore) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("of its process only")
    store.put("a", b"one")
    assert open_store(store.url).get("a") == b"one"
    assert open_store(store.url).url == store.url


def test_what_is_not_there_is_told_apart_from_what_failed(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("a/b")
    with pytest.raises(ObjectNotFound):
        store.size("a/b")
    store.delete("a/b")
    assert store.list("") == store.list("a/b") == []
    store.put("a/b/c", b"")
    assert store.list("a/b/c/d/") == []
    with pytest.raises(ObjectNotFound):
        store.get("a/b")
    with pytest.raises(ObjectNotFound):
        store.size("a/b")


def test_deleted_objects_are_gone(store: ObjectStore) -> None:
    store.put("a/b", b"one")
    store.delete("a/b")
    store.delete("a/b")
    assert store.list("") == []
    assert store.put_if_absent("a/b", b"two")


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (tmp_path / "store").as_uri()
    create_store(url)
    store = open_store(url)
    store.put("a/b", b"one")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        store.put("a/b", b"two")
    with pytest.raises(StoreError, match="No space left on device"):
        store.upload("a/c", memoryview(b"three"), deadline_s=10)
    monkeypatch.undo()
    assert (store.get("a/b"), store.list(""), store.unfinished("")) == (b"one", ["a/b"], [])


def test_a_file_that_is_nobodys_object_is_in_nobodys_way(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    create_store(url)
    store = open_store(url)
    store.put("a/b", b"one")
    (tmp_path / "store" / "a" / "README copy.txt").write_text("an editor's")
    assert store.sizes("a/") == {"a/README copy.txt": 11, "a/b": 3}


def test_listing_is_ordered_and_begins_where_it_is_told(store: ObjectStore) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/c", "a-b", "b"]
    for key in keys:
        store.put(key, key.encode())
    assert store.list("") == sorted(keys)
    assert store.list("a/") == ["a/1", "a/10", "a/2", "a/b/c"]
    assert store.list("a/1") == ["a/1", "a/10"]
    assert store.list("a/", start_after="a/10") == ["a/2", "a/b/c"]
    assert list(store.sizes("a/").items()) == [(key, len(store.get(key))) for key in store.list("a/")]
    assert store.list("c/") == []


def test_more_keys_than_one_answer_of_s3_holds(store: ObjectStore) -> None:
    keys = [f"many/{number:04d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert store.list("many/") == keys


def test_put_if_absent_writes_once(store: ObjectStore) -> None:
    assert store.put_if_absent("a/b", b"one")
    assert store.put_if_absent("a/b", b"one"), "our own answer that got lost"
    assert not store.put_if_absent("a/b", b"two")
    assert store.get("a/b") == b"one"


def test_a_race_has_exactly_one_winner(store: ObjectStore) -> None:
    num_writers, rounds = 8, 10
    gate = threading.Barrier(num_writers)

    def write(number: int) -> list[bool]:
        won = []
        for turn in range(rounds):
            gate.wait(30)
            won.append(store.put_if_absent(f"race/{turn}", str(number).encode()))
        return won

    with ThreadPoolExecutor(num_writers) as pool:
        results = list(pool.map(write, range(num_writers)))
    for turn in range(rounds):
        winners = [number for number in range(num_writers) if results[number][turn]]
        assert [store.get(f"race/{turn}")] == [str(winner).encode() for winner in winners]


@pytest.mark.parametrize("key", STRANGE_KEYS)
def test_strange_keys_are_refused(store: ObjectStore, key: str) -> None:
    for act in (store.get, store.size, store.delete, lambda k: store.put(k, b""), lambda k: store.put_if_absent(k, b"")):
        with pytest.raises(ValueError, match="is no key"):
            act(key)


def test_a_large_object(store: ObjectStore) -> None:
    data = bytes(range(256)) * 4096 * 12
    store.put("large", data)
    assert store.get("large") == data


@pytest.mark.parametrize("num_bytes", [0, 1, PART, PART + 1, 3 * PART + 7])
def test_large_objects_go_up_and_come_down_whole(store: ObjectStore, num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    sent = store.upload("large", memoryview(data), deadline_s=60)
    assert (sent.num_bytes, store.size("large"), store.get("large") == data) == (num_bytes, num_bytes, True)
    into, seen = bytearray(num_bytes), list[int]()
    got = store.download("large", memoryview(into), deadline_s=60, arrived=seen.append)
    assert bytes(into) == data
    assert seen == sorted(seen)
    assert seen[-1:] == [num_bytes][: min(1, num_bytes)]
    assert got.attempts >= got.parts >= 1
    assert store.unfinished("") == []


def test_an_upload_replaces_what_was_there(store: ObjectStore) -> None:
    store.put("large", b"small")
    store.upload("large", memoryview(b"x" * (PART + 1)), deadline_s=60)
    store.upload("large", memoryview(b"y" * (PART + 2)), deadline_s=60)
    assert store.get("large") == b"y" * (PART + 2)


def test_what_changes_does_not_reach_an_upload_that_is_done(store: ObjectStore) -> None:
    data = bytearray(b"1" * (PART + 1))
    store.upload("large", memoryview(data), deadline_s=60)
    data[:] = b"2" * len(data)
    assert store.get("large") == b"1" * (PART + 1)


@pytest.mark.parametrize("num_bytes", [0, 4, PART, 2 * PART])
def test_an_object_of_another_size_is_not_taken_for_the_one_wanted(store: ObjectStore, num_bytes: int) -> None:
    store.upload("large", memoryview(b"x" * (PART + 1)), deadline_s=60)
    with pytest.raises(StoreError, match=f"does not have {num_bytes} bytes") as caught:
        store.download("large", memoryview(bytearray(num_bytes)), deadline_s=60)
    assert not isinstance(caught.value, ObjectNotFound)


def test_what_is_not_there_cannot_be_downloaded(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound):
        store.download("a/b", memoryview(bytearray(5)), deadline_s=60)


def test_a_transfer_that_takes_too_long_ends_and_leaves_nothing(store: ObjectStore) -> None:
    data = memoryview(bytes(2 * PART))
    with pytest.raises(StoreError, match="took longer than 0 s"):
        store.upload("a/large", data, deadline_s=0.0)
    with pytest.raises(ObjectNotFound):
        store.size("a/large")
    store.upload("a/large", data, deadline_s=60)
    with pytest.raises(StoreError, match="took longer than 0 s"):
        store.download("a/large", memoryview(bytearray(2 * PART)), deadline_s=0.0)


def leave_unfinished(store: ObjectStore, key: str) -> None:
    """What a writer leaves that was killed during an upload."""
    if isinstance(store, S3Store):
        store._connection.client.create_multipart_upload(Bucket=store._bucket, Key=f"{store._prefix}{key}")
        return
    if isinstance(store, MemoryStore):
        store.begin(key)
        return
    path = Path(store.url.removeprefix("file://")) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.{'0' * 32}.part").write_bytes(b"half")


def test_unfinished_uploads_are_told_and_can_be_given_up(store: ObjectStore) -> None:
    for key in ("a/b.x", "a/b", "c"):
        leave_unfinished(store, key)
    assert store.list("") == []
    assert store.unfinished("a/") == ["a/b", "a/b.x"]
    store.give_up("a/b")
    store.give_up("a/b")
    assert store.unfinished("") == ["a/b.x", "c"]
    store.put("a/b.x", b"done")
    store.give_up("a/b.x")
    assert (store.unfinished("a/"), store.get("a/b.x")) == ([], b"done")


def test_a_usable_store_passes_the_check(store: ObjectStore) -> None:
    check_store(store)
    assert store.list("") == []


def test_an_unreachable_server_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(StoreError, match=r"s3://nobody is out of reach: .*127.0.0.1:9.*; check the bucket's name"):
        check_store(open_store("s3://nobody"))


def test_a_missing_bucket_is_one_clear_sentence(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    store = open_store("s3://missing-bucket")
    with pytest.raises(StoreError, match="there is no bucket 'missing-bucket'"):
        check_store(store)


def test_a_file_in_the_directorys_place_is_a_failure_not_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    store = open_store((tmp_path / "store").as_uri())
    for act in (lambda: store.list(""), lambda: store.get("a"), lambda: store.size("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreError) as caught:
            act()
        assert not isinstance(caught.value, ObjectNotFound)


def test_half_written_files_are_not_listed(tmp_path: Path) -> None:
    create_store((tmp_path / "store").as_uri())
    store = open_store((tmp_path / "store").as_uri())
    store.put("a/b", b"")
    (tmp_path / "store" / "a" / ".0123.tmp").write_bytes(b"half")
    assert store.list("") == ["a/b"]


def test_a_directory_that_is_not_there_is_one_clear_sentence_and_stays_so(tmp_path: Path) -> None:
    """An unmounted store must not look like an empty one."""
    store = open_store((tmp_path / "away").as_uri())
    for use in (lambda: store.get("a"), lambda: store.list(""), lambda: store.put_if_absent("a", b"")):
        with pytest.raises(StoreError, match="there is no directory") as caught:
            use()
        assert not isinstance(caught.value, ObjectNotFound)
    assert not (tmp_path / "away").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="check the directory"):
        check_store(open_store((tmp_path / "file" / "store").as_uri()))


@pytest.mark.parametrize(
    "url", ["", "dir", "/dir", "http://x/y", "s3://", "s3://UPPER", "s3://bucket/../x", "file://host/x", "file://"]
)
def test_other_urls_are_the_users_mistake(url: str) -> None:
    with pytest.raises(UserError, match=r"is no object store: give file:///|is no key"):
        open_store(url)
