"""Stands for the agent of a script's session."""

import json
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from unicron_lib.domain.jobs import JobSpec


class Listener:
    """Stands for the agent."""

    def __init__(self, folder: Path, **keys: object) -> None:
        """Its job has these `keys`."""
        self.path = folder / "s"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen()
        self.variables = {
            "UNICRON_JOB_SPEC": TypeAdapter(JobSpec).dump_json(JobSpec(job="a", command=("x",), **keys)).decode(),
            "UNICRON_GENERATION": "2",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "UNICRON_RUN_DIR": str(folder),
            "UNICRON_AGENT_SOCKET": str(self.path),
            "UNICRON_STORE_URL": "file:///nowhere",
            "UNICRON_BEAT_FILE": str(folder / "beats"),
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        }
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            self._connection, _ = self._server.accept()
            for line in self._connection.makefile("rb"):
                self._heard.put(line)

    def hear(self) -> dict[str, object]:
        return json.loads(self._heard.get(timeout=20))

    def order(self, order: str, **more: object) -> None:
        assert self._connection
        self._connection.sendall(json.dumps({"order": order, **more}).encode() + b"\n")

    def hang_up(self) -> None:
        assert self._connection
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for it in (self._connection, self._server):
            if it:
                it.close()
