"""Connections of torch are broken, and nothing else."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from unicron_lib.training.abort import Breaker, break_connections, store_ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as it:
        yield it


class Foreign:
    """A connection that no Python object owns in this process, as those of torch."""

    def __init__(self, listener: socket.socket) -> None:
        self.descriptor = socket.create_connection(listener.getsockname()).detach()
        self.other, _ = listener.accept()

    def close(self) -> None:
        os.close(self.descriptor)
        self.other.close()


def test_a_connection_of_torch_ends_and_one_to_the_object_store_stays(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.getsockname()[1]}")
        with socket.create_connection(listener.getsockname()), socket.create_connection(store.getsockname()) as own:
            before = len(list(Path("/proc/self/fd").iterdir()))
            assert break_connections() >= 1
            assert len(list(Path("/proc/self/fd").iterdir())) <= before
            with listener.accept()[0] as other:
                assert other.recv(1) == b"", "the other end sees it"
            own.sendall(b"x")
            with store.accept()[0] as server:
                assert server.recv(1) == b"x"


@pytest.mark.parametrize(
    ("variables", "ports"),
    [
        ({}, {443, 80}),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, {443, 80, 9000}),
        ({"AWS_ENDPOINT_URL_S3": "https://minio.example:9443/", "AWS_ENDPOINT_URL": "https://sts.example"}, {443, 80, 9443}),
    ],
)
def test_the_object_store_is_known_by_its_port(variables: dict[str, str], ports: set[int]) -> None:
    assert store_ports(variables) == ports


def test_a_listening_socket_still_accepts(listener: socket.socket) -> None:
    """gloo terminates the process when its own does not."""
    address = listener.getsockname()
    with socket.socket(fileno=listener.detach()) as again:
        descriptor = again.detach()
        break_connections()
        with socket.socket(fileno=descriptor) as back, socket.create_connection(address):
            back.accept()[0].close()


def test_what_is_opened_while_the_breaker_runs_is_broken_too_until_it_stops(listener: socket.socket) -> None:
    aborted = threading.Event()
    breaker = Breaker(aborted.set)
    breaker.start()
    breaker.start()
    with closing(Foreign(listener)) as later:
        assert later.other.recv(1) == b""
    breaker.stop()
    breaker.stop()
    assert aborted.is_set()
    with closing(Foreign(listener)) as spared:
        spared.other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            spared.other.recv(1)
