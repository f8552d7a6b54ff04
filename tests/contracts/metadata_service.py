"""A stand-in for EC2's instance metadata service, version 2, on a real socket."""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPOT = "/latest/meta-data/spot/instance-action"
SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"


@dataclass
class MetadataService:
    """Answers with `documents`, or 404, whoever shows a token of this service; `requests` are what it was asked for.

    While `silent` is set it answers nobody.
    """

    documents: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    refuses_tokens: bool = False
    silent: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        service, self._loud = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                service.requests.append(f"PUT {self.path}")
                asked = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                if service.refuses_tokens or not asked:
                    self._answer(403, b"")
                    return
                service.tokens.append(f"token-{len(service.tokens)}")
                self._answer(200, service.tokens[-1].encode())

            def do_GET(self) -> None:
                service.requests.append(f"GET {self.path}")
                if service.silent.is_set():
                    service._loud.wait(30)
                if self.headers["X-aws-ec2-metadata-token"] not in service.tokens[-1:]:
                    self._answer(401, b"")
                elif self.path in service.documents:
                    self._answer(200, service.documents[self.path])
                else:
                    self._answer(404, b"<html>not found</html>")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def announces(self, action: str, time: str) -> None:
        self.documents[SPOT] = json.dumps({"action": action, "time": time}).encode()

    def expire_tokens(self) -> None:
        """As after their time is over."""
        self.tokens.append("nobody was given this one")

    def close(self) -> None:
        self._loud.set()
        self._server.shutdown()
        self._server.server_close()
