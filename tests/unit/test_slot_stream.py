"""A state's bytes through the kernel: all of them and their digest, or one clear error; no pipe stays open."""

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from unicron_lib.agent import slot_stream
from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.errors import SlotError

BEGIN = 4096


def patient() -> float:
    return 10.0


def impatient() -> float:
    return 0.01


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: who sends, who receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        far.settimeout(10.0)
        yield near, far


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[int]:
    """The descriptor of a file to be filled."""
    descriptor = os.open(tmp_path / "slot", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def receive(far: socket.socket, slot: int, num_bytes: int, limit: slot_stream.Limit = patient) -> str:
    return slot_stream.receive(far, slot, begin=BEGIN, num_bytes=num_bytes, limit=limit)


@pytest.mark.parametrize("num_bytes", [1, 7, 4097, (1 << 20) - 3, slot_stream.SENT_BYTES, 9 * (1 << 20) + 11])
def test_all_bytes_come_with_their_digest(ends, slot: int, tmp_path: Path, num_bytes: int) -> None:
    near, far = ends
    state = secrets.token_bytes(num_bytes)
    (tmp_path / "sent").write_bytes(bytes(BEGIN) + state + b"what is behind it")
    sent = {"begin": BEGIN, "num_bytes": num_bytes, "limit": patient}
    with (tmp_path / "sent").open("rb") as file:
        sending = threading.Thread(target=lambda: slot_stream.send(near, file, **sent))
        sending.start()
        assert receive(far, slot, num_bytes) == digest_of(memoryview(state))
        sending.join()
    assert os.pread(slot, num_bytes + 100, BEGIN) == state


def test_what_comes_in_drops_is_put_together(ends, slot: int) -> None:
    near, far = ends
    state = secrets.token_bytes(300_000)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def drip() -> None:
        for at in range(0, len(state), 777):
            near.sendall(state[at : at + 777])

    sending = threading.Thread(target=drip)
    sending.start()
    assert receive(far, slot, len(state)) == digest_of(memoryview(state))
    sending.join()


def test_an_end_in_the_midst_is_told(ends, slot: int) -> None:
    near, far = ends
    near.sendall(bytes(5000))
    near.close()
    before = num_open()
    with pytest.raises(SlotError, match="the connection ended after 5000 of 9000 bytes"):
        receive(far, slot, 9000)
    assert num_open() == before


def test_silence_is_told(ends, slot: int) -> None:
    near, far = ends
    near.sendall(bytes(5000))
    before = num_open()
    with pytest.raises(SlotError, match=r"the other side fell silent after \d+ of 9000 bytes"):
        receive(far, slot, 9000, impatient)
    assert num_open() == before


def test_who_takes_nothing_is_told(ends, tmp_path: Path) -> None:
    near, _ = ends
    (tmp_path / "sent").write_bytes(bytes(64 << 20))
    with (tmp_path / "sent").open("rb") as file, pytest.raises(SlotError, match=r"the other side took no more than \d+ of"):
        slot_stream.send(near, file, begin=0, num_bytes=64 << 20, limit=impatient)


def test_a_file_that_is_cut_is_told(ends, tmp_path: Path) -> None:
    near, _ = ends
    (tmp_path / "sent").write_bytes(bytes(5000))
    with (tmp_path / "sent").open("rb") as file, pytest.raises(SlotError, match="the slot ended after 4000 of 9000 bytes"):
        slot_stream.send(near, file, begin=1000, num_bytes=9000, limit=patient)


def test_a_slot_that_is_cut_meanwhile_is_told(ends, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    near.sendall(bytes(5000))
    moved = slot_stream._move

    def cut(*args) -> int:
        num_bytes = moved(*args)
        os.ftruncate(slot, BEGIN)
        return num_bytes

    monkeypatch.setattr(slot_stream, "_move", cut)
    with pytest.raises(SlotError, match="the slot was cut while a state came"):
        receive(far, slot, 5000)


def test_a_pipe_that_may_not_be_large_does_as_well(ends, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_) -> int:
        raise PermissionError

    monkeypatch.setattr(slot_stream.fcntl, "fcntl", refuse)
    near, far = ends
    state = secrets.token_bytes(1 << 20)
    sending = threading.Thread(target=near.sendall, args=(state,))
    sending.start()
    assert receive(far, slot, len(state)) == digest_of(memoryview(state))
    sending.join()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_no_pipe_is_left_open_whatever_happens(ends, slot: int, monkeypatch: pytest.MonkeyPatch, error) -> None:
    near, far = ends
    before = num_open()

    def fail(*_, **__) -> int:
        raise error

    near.sendall(bytes(100))
    monkeypatch.setattr(os, "splice", fail)
    for _ in range(3):
        with suppress(OSError, KeyboardInterrupt):
            receive(far, slot, 100)
            pytest.fail("it was received")
    assert num_open() == before
