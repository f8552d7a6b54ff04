"""What every object store must do; S3 (by a local server) and the directory pass the same tests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from unicron_lib.adapters.stores import check_store, create_store, open_store
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import ObjectNotFound, StoreError, UserError

STRANGE_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".hidden", "a b", "a\nb", "ä", "a\\b", "a%2e", "x" * 1000]


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "file":
        url = (tmp_path / "store").as_uri()
        create_store(url)
        return open_store(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"bucket-{abs(hash(str(tmp_path)))}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/some/prefix")


def test_what_is_put_can_be_read(store: ObjectStore) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("empty", b"")
    assert (store.get("a/b"), store.size("a/b"), store.get("empty"), store.size("empty")) == (b"two", 3, b"", 0)


def test_every_process_gets_the_same_store_by_its_url(store: ObjectStore) -> None:
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


def test_listing_is_ordered_and_begins_where_it_is_told(store: ObjectStore) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/c", "a-b", "b"]
    for key in keys:
        store.put(key, b"")
    assert store.list("") == sorted(keys)
    assert store.list("a/") == ["a/1", "a/10", "a/2", "a/b/c"]
    assert store.list("a/1") == ["a/1", "a/10"]
    assert store.list("a/", start_after="a/10") == ["a/2", "a/b/c"]
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
