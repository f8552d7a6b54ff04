"""Take a local cluster's object store away for a while: a directory by its name, an S3 server by stopping it."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from urllib.parse import unquote, urlsplit

import psutil

from unicron_lib.errors import UserError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def take_away(store_url: str, env: Mapping[str, str], *, seconds: float) -> None:
    """Put the store out of reach for `seconds`; it is back on return, also after Ctrl-C or SIGTERM.

    Raises UserError if it is not the store of a cluster on this machine.
    """
    outage = _away(store_url) if store_url.startswith("file:") else _stopped(_server(store_url, env))
    with _terminated_politely(), outage:
        time.sleep(seconds)


@contextmanager
def _away(store_url: str) -> Iterator[None]:
    directory = Path(unquote(urlsplit(store_url).path))
    hidden = directory.with_name(f".{directory.name}.away")
    try:
        directory.rename(hidden)
    except OSError as error:
        raise UserError(f"the store {directory} cannot be moved away ({error.strerror}): is it there, and yours?") from error
    try:
        yield
    finally:
        _put_back(hidden, directory)


def _put_back(hidden: Path, directory: Path) -> None:
    try:
        hidden.rename(directory)  # a writer that was between two calls may have made it anew: fine, if it is empty
    except OSError as error:
        raise UserError(
            f"the store is still in {hidden}, for something was written to a new {directory} ({error.strerror}): "
            "move that into it, then give it its name back"
        ) from error


@contextmanager
def _stopped(server: psutil.Process) -> Iterator[None]:
    server.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            server.resume()


def _server(store_url: str, env: Mapping[str, str]) -> psutil.Process:
    """The S3 server that the local cluster started. Raises UserError if the store is another one."""
    endpoint = urlsplit(env.get("AWS_ENDPOINT_URL", ""))
    if endpoint.hostname in LOOPBACK:
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "moto.server" in line and str(endpoint.port) in line:
                return process
    raise UserError(f"{store_url} is not the store of a local cluster: only its own can be taken away, take yours away by hand")


@contextmanager
def _terminated_politely() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: with its clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
