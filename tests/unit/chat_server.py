"""A server that speaks OpenAI's chat completions over a real socket, as well or as badly as a test wants."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = Callable[[BaseHTTPRequestHandler], None]


class ChatServer(ThreadingHTTPServer):
    """Gives `replies` one after another, over and over, and keeps what arrived: `bodies` as bytes, and the `headers`.

    `sent_bytes` counts what a reply without end got rid of. It ends as soon as `closing` is set.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, replies: list[Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = replies
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.sent_bytes = 0
        self.closing = threading.Event()
        self._taking = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """Note a question; the reply that is its turn."""
        with self._taking:
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            return self.replies[(len(self.bodies) - 1) % len(self.replies)]

    @property
    def asked(self) -> list[dict]:
        return [json.loads(body) for body in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        reply = self.server.take(self.path, dict(self.headers), body)
        with suppress(ConnectionError):  # who asked may have lost patience
            reply(self)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def chat_server(*replies: Reply) -> Iterator[ChatServer]:
    """A server that runs while the block does."""
    with ChatServer(list(replies)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


def raw(status: int, body: bytes, **headers: str) -> Reply:
    """A whole answer."""

    def reply(to: BaseHTTPRequestHandler) -> None:
        to.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            to.send_header(name.replace("_", "-"), value)
        to.end_headers()
        to.wfile.write(body)

    return reply


def says(content: object) -> Reply:
    """What a model says, in the shape in which servers give it."""
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [message]}
    return raw(200, json.dumps(answer).encode(), Content_Type="application/json")


def drips(of: bytes) -> Reply:
    """Bytes so slowly that the last of them never comes, each of them soon enough for a timeout between bytes."""

    def reply(to: BaseHTTPRequestHandler) -> None:
        for byte in of:
            to.wfile.write(bytes([byte]))
            if to.server.closing.wait(0.05):
                return

    return reply


def is_silent(to: BaseHTTPRequestHandler) -> None:
    """The connection stays, nothing comes."""
    to.server.closing.wait()


def hangs_up(to: BaseHTTPRequestHandler) -> None:
    """The connection ends without a word."""
    to.connection.shutdown(socket.SHUT_RDWR)


def never_ends(to: BaseHTTPRequestHandler) -> None:
    """A body for which no memory is enough."""
    to.send_response(200)
    to.end_headers()
    while not to.server.closing.is_set():
        to.server.sent_bytes += to.wfile.write(b" " * 65536)
        time.sleep(0)
