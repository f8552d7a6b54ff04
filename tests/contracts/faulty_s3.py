"""A small S3 on loopback that fails as it is told: slow, busy, cut, silent, or with bits that flip on their way."""

import base64
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as ET

from awscrt.checksums import crc32c

ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>{0}</Message></Error>"
Fault = tuple[object, ...] | None


@dataclass(frozen=True)
class Request:
    """What came in: `what` is put, part, begin, complete, abort, get, head or delete; `nth` counts requests alike from 1."""

    what: str
    key: str
    part: int
    nth: int
    access_key: str


@dataclass
class FaultyS3:
    """`fault` looks at each request before it is served; what it may say stands in `serve`. `seen` is all that came."""

    fault: Callable[[Request], Fault] = lambda _request: None
    objects: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    marks: dict[str, dict[str, str]] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)
    fired: list[tuple[Request, Fault]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def parts_sent(self) -> list[int]:
        return [request.part for request in self.seen if request.what == "part"]


class Server:
    """Serves one store after the other at one address, so that clients, which are slow to make, can be kept."""

    def __init__(self) -> None:
        self._handler: type[_Handler] = type("Handler", (_Handler,), {})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def store(self) -> Iterator[FaultyS3]:
        """An empty store; whoever it keeps waiting is let go at the end."""
        self._handler.store = store = FaultyS3()
        try:
            yield store
        finally:
            store.released.set()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyS3

    def log_message(self, *_args: object) -> None: ...

    def _serve(self) -> None:
        self.store = type(self).store  # the next test's must not get what this one's client still sends
        url = urlsplit(self.path)
        self.key, self.query = url.path.lstrip("/"), parse_qs(url.query, keep_blank_values=True)
        access = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        request = self._request(access[1] if access else "")
        fault = self.store.fault(request)
        with self.store.lock:
            self.store.seen.append(request)
            if fault:
                self.store.fired.append((request, fault))
        self._act(request, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _request(self, access_key: str) -> Request:
        query = self.query
        uploading = "uploadId" in query
        what = {
            "GET": "get",
            "HEAD": "head",
            "PUT": "part" if uploading else "put",
            "POST": "complete" if uploading else "begin",
            "DELETE": "abort" if uploading else "delete",
        }[self.command]
        part = int(query.get("partNumber", ["0"])[0])
        with self.store.lock:
            nth = 1 + sum((it.what, it.key, it.part) == (what, self.key, part) for it in self.store.seen)
        return Request(what, self.key, part, nth, access_key)

    def _act(self, request: Request, fault: Fault) -> None:  # noqa: C901 - one case a fault
        match fault:
            case None:
                self._work(request)
            case ("status", int() as status, str() as code):
                self._body()
                self._answer(status, ERROR.format(code).encode())
            case ("reset",):  # in the middle of what the client sends
                self.rfile.read(min(10, int(self.headers.get("Content-Length", 0))))
                self._reset()
            case ("cut", int() as num_bytes):  # in the middle of what the client receives
                self._work(request, at_most=num_bytes)
            case ("lose answer",):
                self._work(request, silent=True)
                self._reset()
            case ("flip",):
                self._work(request, flip=True)
            case ("silence",):
                self.store.released.wait(30)
                self._reset()
            case ("drip", float() as pause_s):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not self.store.released.wait(pause_s):
                    try:
                        self.wfile.write(b"x")
                    except OSError:
                        break
                self.close_connection = True
            case _:
                raise AssertionError(fault)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _work(self, request: Request, *, at_most: int | None = None, silent: bool = False, flip: bool = False) -> None:
        body = self._body()
        if flip and request.what in {"put", "part"}:
            body = bytes([body[0] ^ 1]) + body[1:]
        status, answer, headers = self._result(request, body)
        if flip and request.what == "get":
            answer = bytes([answer[0] ^ 1]) + answer[1:]
        if not silent:
            self._answer(status, answer, headers, at_most)

    def _result(self, request: Request, body: bytes) -> tuple[int, bytes, dict[str, str]]:  # noqa: PLR0911 - one a request
        store, key = self.store, request.key
        upload = self.query.get("uploadId", [""])[0]
        told = self.headers.get("x-amz-checksum-crc32c")
        if told and told != base64.b64encode(crc32c(body).to_bytes(4, "big")).decode():
            return 400, ERROR.format("BadDigest").encode(), {}
        with store.lock:
            match request.what:
                case "begin":
                    upload = f"upload-{len(store.marks)}"
                    store.uploads[upload], store.marks[upload] = {}, self._metadata()
                    xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                    return 200, xml.encode(), {}
                case "put":
                    store.objects[key] = (body, self._metadata())
                    return 200, b"", {"ETag": '"e"'}
                case "delete":
                    store.objects.pop(key, None)
                    return 204, b"", {}
                case "part" | "complete" | "abort" if upload not in store.uploads:
                    return 404, ERROR.format("NoSuchUpload").encode(), {}
                case "part":
                    store.uploads[upload][request.part] = body
                    return 200, b"", {"ETag": f'"e{request.part}"'}
                case "complete":
                    parts = store.uploads.pop(upload)
                    named = [int(it.text or 0) for it in ET.fromstring(body).iter() if it.tag.endswith("PartNumber")]
                    assert named == sorted(parts)
                    store.objects[key] = (b"".join(parts[number] for number in named), store.marks[upload])
                    return 200, b"<CompleteMultipartUploadResult/>", {}
                case "abort":
                    del store.uploads[upload]
                    return 204, b"", {}
            return self._read(key)

    def _metadata(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}

    def _read(self, key: str) -> tuple[int, bytes, dict[str, str]]:
        if key not in self.store.objects:
            return 404, ERROR.format("NoSuchKey").encode(), {}
        data, metadata = self.store.objects[key]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return 200, data, metadata
        begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        return 206, data[begin:end], {**metadata, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, at_most: int | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:at_most])
            if at_most is not None:
                self.wfile.flush()
                self.close_connection = True
        except OSError:
            self.close_connection = True
