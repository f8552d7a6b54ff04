"""Transfers against an S3 that fails: repeated within their deadline, never wrong, and what is there is not sent again."""

import logging
import os
import random
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import botocore.loaders
import pytest
from faulty_s3 import FaultyS3, Request, Server

from unicron_lib.adapters import limits, s3_client
from unicron_lib.adapters.s3 import S3Store
from unicron_lib.errors import StoreError, UserError

PART = 100_000
DATA = random.Random(1).randbytes(5 * PART + 17)
PARTS = [1, 2, 3, 4, 5, 6]
BUSY = ("status", 503, "SlowDown")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def kept_client():
    make = s3_client.make_client

    @cache
    def of(_endpoint: str, _access_key: str, attempts: int):
        return make(attempts=attempts)

    return of


@pytest.fixture
def s3(server: Server, kept_client, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    def made(*, attempts: int = 4):
        return kept_client(os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_ACCESS_KEY_ID"], attempts)

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(s3_client, "BACK_OFF_S", (0.005, 0.05))
    monkeypatch.setattr(s3_client, "make_client", made)
    with server.store() as store:
        yield store


@pytest.fixture
def store(s3: FaultyS3) -> S3Store:
    made = S3Store("bucket", "prefix", part_bytes=PART, range_bytes=PART)
    assert made._large.client, "a client is not made within a deadline of these tests"
    assert made._connection.client
    return made


def upload(store: S3Store, *, deadline_s: float = 60.0):
    return store.upload("a", memoryview(DATA), deadline_s=deadline_s)


def stored(s3: FaultyS3) -> bytes:
    return s3.objects["bucket/prefix/a"][0]


def first(what: str, times: int, fault: tuple) -> "callable":
    return lambda request: fault if request.what == what and request.nth <= times else None


def test_without_faults_each_part_is_sent_once(s3: FaultyS3, store: S3Store) -> None:
    sent = upload(store)
    assert (stored(s3) == DATA, sorted(s3.parts_sent()), sent.parts, sent.attempts) == (True, PARTS, 6, 6)


@pytest.mark.parametrize(
    "fault",
    [BUSY, ("status", 500, "InternalError"), ("status", 400, "RequestTimeout"), ("reset",), ("lose answer",), ("flip",)],
    ids=lambda fault: fault[-1],
)
@pytest.mark.parametrize("what", ["begin", "part", "complete"])
def test_a_fault_that_passes_costs_only_a_repetition(s3: FaultyS3, store: S3Store, what: str, fault: tuple) -> None:
    s3.fault = first(what, 2, fault)
    sent = upload(store)
    assert stored(s3) == DATA
    assert s3.fired
    again = len(s3.fired) if what == "part" else 0
    assert (sent.parts, sent.attempts) == (6, 6 + again)


def test_a_busy_server_and_then_cut_connections_are_outlasted(s3: FaultyS3, store: S3Store) -> None:
    s3.fault = lambda it: (BUSY if it.nth <= 4 else ("reset",) if it.nth <= 7 else None) if it.what == "part" else None
    sent = upload(store)
    assert stored(s3) == DATA
    assert sent.attempts == 6 * 8


def test_small_objects_are_repeated_too(s3: FaultyS3, store: S3Store) -> None:
    s3.fault = first("put", 3, BUSY)
    sent = store.upload("a", memoryview(b"small"), deadline_s=60)
    assert (stored(s3), sent.attempts) == (b"small", 4)


@pytest.mark.parametrize("fault", [("silence",), ("drip", 0.05), BUSY], ids=["silent", "a byte now and then", "always busy"])
@pytest.mark.parametrize("what", ["begin", "part", "complete", "put"])
def test_a_deadline_holds_whatever_the_server_does(s3: FaultyS3, store: S3Store, what: str, fault: tuple) -> None:
    s3.fault = lambda request: fault if request.what == what else None
    data = memoryview(DATA[:10] if what == "put" else DATA)
    with pytest.raises(StoreError, match=r"took longer than 0.5 s|SlowDown"):
        store.upload("a", data, deadline_s=0.5)
    assert s3.fired
    assert s3.objects == {}
    assert s3.uploads == {}, "the parts were not given up"


@pytest.mark.parametrize("fault", [("silence",), ("drip", 0.05)], ids=["silent", "a byte now and then"])
def test_downloads_and_small_requests_have_deadlines_too(s3: FaultyS3, store: S3Store, fault: tuple) -> None:
    store.upload("a", memoryview(DATA), deadline_s=60)
    s3.fault = lambda request: fault if request.what in {"get", "head"} else None
    with pytest.raises(StoreError, match=r"took longer than 0.3 s"):
        store.download("a", memoryview(bytearray(len(DATA))), deadline_s=0.3)
    hasty = S3Store("bucket", "prefix", small_s=0.3)
    for ask in (hasty.get, hasty.size):
        with pytest.raises(StoreError, match=r"took longer than 0.3 s"):
            ask("a")


def test_threads_that_hang_are_limited(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEFT_BEHIND", 2)
    monkeypatch.setattr(limits, "_left_behind", set())
    s3.fault = lambda _request: ("silence",)
    store = S3Store("bucket", small_s=0.05)
    for _ in range(2):
        with pytest.raises(StoreError, match="took longer"):
            store.size("a")
    with pytest.raises(StoreError, match="2 requests hang that were given up"):
        store.size("a")


def test_a_server_that_refuses_connections_is_given_up_soon(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="is out of reach"):
        S3Store("bucket").upload("a", memoryview(b"x"), deadline_s=600)


def test_credentials_that_expire_halfway_are_read_anew(
    s3: FaultyS3, store: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the parts that are not there yet are sent again."""
    accepted = set[int]()
    lock = threading.Lock()

    def expired(request: Request) -> tuple | None:
        if request.what != "part":
            return None
        with lock:
            if request.access_key == "first-key" and len(accepted) >= 2:
                monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
                return ("status", 400, "ExpiredToken")
            accepted.add(request.part)
        return None

    s3.fault = expired
    with caplog.at_level(logging.WARNING, logger="unicron_lib"):
        upload(store)
    assert stored(s3) == DATA
    by_first = {it.part for it in s3.seen if it.what == "part" and it.access_key == "first-key"} - {
        it.part for it, _ in s3.fired
    }
    by_second = [it.part for it in s3.seen if it.what == "part" and it.access_key == "second-key"]
    assert len(by_first) == 2
    assert sorted(by_second) == sorted(set(PARTS) - by_first)
    assert [record.message for record in caplog.records if "expired" in record.message] == [
        "the store's credentials have expired: they are read anew, and the request is repeated"
    ]


def test_small_requests_outlive_expired_credentials(s3: FaultyS3, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"one")

    def expired(request: Request) -> tuple | None:
        if request.access_key == "first-key":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
            return ("status", 400, "ExpiredToken")
        return None

    s3.fault = expired
    assert store.get("a") == b"one"
    assert s3.fired


def test_rotated_keys_are_read_for_the_next_request(s3: FaultyS3, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old ones may be wrong for good: nothing is repeated, but a process that lives for days finds the new ones."""
    upload(store)
    s3.fault = lambda it: ("status", 403, "InvalidAccessKeyId") if it.access_key == "first-key" else None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
    with pytest.raises(StoreError, match="InvalidAccessKeyId"):
        store.get("a")
    with pytest.raises(StoreError, match="InvalidAccessKeyId"):
        upload(store)
    fired = len(s3.fired)
    assert store.get("a") == DATA
    upload(store)
    assert len(s3.fired) == fired


@pytest.mark.parametrize("fault", [("status", 403, "AccessDenied"), ("status", 404, "NoSuchBucket")], ids=lambda it: it[2])
def test_what_no_repetition_cures_is_told_at_once(s3: FaultyS3, store: S3Store, fault: tuple) -> None:
    s3.fault = lambda request: fault if request.what == "begin" else None
    with pytest.raises(StoreError, match=fault[2]):
        upload(store)
    assert len(s3.fired) == 1


@pytest.mark.parametrize("fault", [BUSY, ("cut", 10), ("reset",)], ids=lambda fault: fault[0])
def test_a_download_goes_on_where_it_was_cut(s3: FaultyS3, store: S3Store, fault: tuple) -> None:
    upload(store)
    s3.fault = lambda request: fault if request.what == "get" and request.nth % 2 else None
    into = bytearray(len(DATA))
    got = store.download("a", memoryview(into), deadline_s=60)
    assert bytes(into) == DATA
    assert 6 < got.attempts <= 6 + len(s3.fired), "what is cut behind its last byte need not be asked for again"


def test_encryption_is_asked_for_where_it_is_wanted(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setenv("UNICRON_S3_SSE", "aws:kms")
    monkeypatch.setenv("UNICRON_S3_SSE_KMS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of clients that are watched")
    store = S3Store("bucket", "prefix", part_bytes=PART, range_bytes=PART)
    for connection in (store._connection, store._large):
        connection.client.meta.events.register(
            "before-send.s3", lambda request, **_: asked.append((request.method, dict(request.headers)))
        )
    upload(store)
    store.put("b", b"")
    store.put_if_absent("c", b"")
    encrypted = [
        (method, headers.get("x-amz-server-side-encryption-aws-kms-key-id"))
        for method, headers in asked
        if headers.get("x-amz-server-side-encryption") == b"aws:kms"
    ]
    assert encrypted == [("POST", b"key-1"), ("PUT", b"key-1"), ("PUT", b"key-1")]


@pytest.mark.parametrize(
    ("kind", "key", "told"), [("yes", "", "S3 knows AES256"), ("AES256", "k", "must then be aws:kms"), ("", "k", "aws:kms")]
)
def test_wrong_encryption_is_the_users_mistake(kind: str, key: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        s3_client.encryption({"UNICRON_S3_SSE": kind, "UNICRON_S3_SSE_KMS_KEY_ID": key})


def test_certificates_are_verified() -> None:
    assert s3_client.make_client()._endpoint.http_session._verify


def test_what_a_process_has_learnt_its_children_need_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    load = botocore.loaders.JSONFileLoader.load_file
    monkeypatch.setattr(
        botocore.loaders.JSONFileLoader, "load_file", lambda self, path: (read.append(path), load(self, path))[1]
    )
    s3_client.known.cache_clear()
    s3_client.learn()
    assert {"endpoints", "service-2", "endpoint-rule-set-1"} <= {Path(path).name for path in read}
    read.clear()
    s3_client.make_client()
    assert "service-2" not in {Path(path).name for path in read}
    assert sum(size_of(path) for path in read) < 50_000
    places = list(s3_client.known().search_paths)
    s3_client.make_client()
    assert s3_client.known().search_paths == places


def size_of(path: str) -> int:
    return sum(it.stat().st_size for it in Path(path).parent.glob(f"{Path(path).name}.json*"))
