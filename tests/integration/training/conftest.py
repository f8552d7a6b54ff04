"""Real ranks on gloo, forked by the real fork server; a fake agent stands at the other end of their sockets."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import elastic
import pytest
from pydantic import TypeAdapter
from training_jobs import reference_losses

from unicron_lib.agent.beats import BEAT_FILE, beat_path
from unicron_lib.agent.rank_messages import FromRank, RankOrder, from_rank, rank_order
from unicron_lib.domain.jobs import JobSpec

DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 240.0
"""For torch and megatron, on a machine that others use, too."""


class FakeAgent:
    """Listens where ranks dial, keeps what each of them says with the time it came, and passes orders on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.said: list[tuple[float, FromRank]] = []
        self._changed = threading.Condition()
        self._connections: dict[tuple[int, int], socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    message = from_rank.validate_json(line)
                    with self._changed:
                        self._connections[message.generation, message.rank] = connection
                        self.said.append((time.monotonic(), message))
                        self._changed.notify_all()
        except OSError:
            pass

    def wait(self, kind, *, generation: int, rank: int, when: Callable[[FromRank], bool] = lambda _: True):
        """The first message of that kind from that rank for which `when` holds; returns (monotonic time, message)."""

        def found():
            return next(
                (
                    (at, m)
                    for at, m in self.said
                    if isinstance(m, kind) and (m.generation, m.rank) == (generation, rank) and when(m)
                ),
                None,
            )

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, DEADLINE_S), f"no {kind.__name__} of rank {rank} came"
            return found()

    def all(self, kind, *, generation: int, rank: int) -> list:
        with self._changed:
            return [m for _, m in self.said if isinstance(m, kind) and (m.generation, m.rank) == (generation, rank)]

    def order(self, generation: int, rank: int, order: str, **more: object) -> None:
        self._connections[generation, rank].sendall(rank_order.dump_json(RankOrder(order=order, **more)) + b"\n")

    def rename(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """The process that was generation and rank `old` is `new` from here on."""
        with self._changed:
            self._connections[new] = self._connections[old]

    def hang_up(self, generation: int, rank: int) -> None:
        self._connections[generation, rank].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections.values():
            connection.close()


class ForkServer:
    """The client's side of `unicron_lib.agent.forkserver`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "unicron_lib.agent.forkserver", "--preload", "unicron_lib.training.rank"]
        here = {"PYTHONPATH": str(Path(__file__).parent)}  # for targets that are tests' own
        environment = os.environ | here | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours
        self._changed = threading.Condition()
        self._events: list[dict] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.await_event("ready", deadline_s=IMPORT_DEADLINE_S)

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                with self._changed:
                    self._events.append(json.loads(line))
                    self._changed.notify_all()

    def await_event(self, event: str, identifier: str | None = None, *, deadline_s: float = DEADLINE_S) -> dict:
        def found():
            return next((e for e in self._events if e["event"] == event and e.get("id") == identifier), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, deadline_s), f"no event {event} of {identifier}"
            return found()

    def spawn(self, identifier: str, target: str, env: dict[str, str], log: Path) -> int:
        request = {"id": identifier, "target": target, "env": env, "log": str(log)}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self.await_event("spawned", identifier)["pid"]

    def has_ended(self, identifier: str) -> bool:
        return any(e["event"] == "exited" and e["id"] == identifier for e in self._events)

    def exit_code(self, identifier: str) -> int:
        return self.await_event("exited", identifier)["code"]

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.process.wait(DEADLINE_S)


class Ranks:
    """Starts generations of one job and ends whatever is left of them."""

    def __init__(self, server: ForkServer, run_dir: Path, store_url: str) -> None:
        self._server = server
        self.run_dir = run_dir
        (run_dir / "beats").mkdir()
        self.store_url = store_url
        self.extra: dict[str, str] = {}
        self._short = tempfile.mkdtemp(prefix="u")
        self.agent = FakeAgent(f"{self._short}/agent")
        self._started: dict[str, int] = {}
        self._renamed: dict[str, str] = {}

    def launch(
        self,
        spec: JobSpec,
        world_size: int,
        *,
        generation: int = 1,
        restore_from: str | None = None,
        only: set[int] | None = None,
        kept: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Start a generation; `kept` says which of its ranks are parked ones, by their generation and rank until now."""
        port = self._open_rendezvous(spec, generation)
        for rank in sorted(only or range(world_size)):
            env = self._environment(spec, world_size, generation=generation, rank=rank, port=port, restore_from=restore_from)
            name = self.name(spec.job, generation, rank)
            if (old := (kept or {}).get(rank)) is None:
                self._spawn(name, "unicron_lib.training.rank:main", env)
            else:
                self._renamed[name] = self._process(spec.job, *old)
                self.agent.order(*old, "assign", environment=env | self.extra)
                self.agent.rename(old, (generation, rank))

    def _environment(
        self, spec: JobSpec, world_size: int, *, generation: int, rank: int, port: int, restore_from: str | None
    ) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "UNICRON_JOB_ID": spec.job,
            "UNICRON_GENERATION": str(generation),
            "UNICRON_RUN_DIR": str(self.run_dir),
            "UNICRON_AGENT_SOCKET": self.agent.path,
            "UNICRON_STORE_URL": self.store_url,
            "UNICRON_JOB_SPEC": TypeAdapter(JobSpec).dump_json(spec).decode(),
            "UNICRON_TP": str(spec.tensor_model_parallel_size),
            "UNICRON_PP": str(spec.pipeline_model_parallel_size),
            "UNICRON_NODE": "node-0",
            "UNICRON_LOG_FILE": str(self._log(self.name(spec.job, generation, rank))),
            "TORCHELASTIC_ERROR_FILE": str(self.run_dir / f"error-{generation}-{rank}.json"),
            BEAT_FILE: str(beat_path(self.run_dir, spec.job, generation, rank)),
        } | ({"UNICRON_RESTORE_FROM": restore_from} if restore_from else {})

    def _open_rendezvous(self, spec: JobSpec, generation: int) -> int:
        file = self.run_dir / f"port-{generation}"
        env = {"MASTER_ADDR": "127.0.0.1", "UNICRON_PORT_FILE": str(file)}
        self._spawn(f"{self.run_dir}/{spec.job}/{generation}/store", "unicron_lib.training.rendezvous:main", env)
        deadline = time.monotonic() + DEADLINE_S
        while not file.exists():
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        return json.loads(file.read_text())["port"]

    def _spawn(self, name: str, target: str, env: dict[str, str]) -> None:
        self._started[name] = self._server.spawn(name, target, env | self.extra, self._log(name))

    def _log(self, name: str) -> Path:
        return self.run_dir / f"{name.replace('/', '-')[-40:]}.log"

    def _process(self, job: str, generation: int, rank: int) -> str:
        """The name under which the rank's process was started."""
        name = self.name(job, generation, rank)
        return self._renamed.get(name, name)

    def run(self, name: str, target: str, env: dict[str, str]) -> None:
        """Start any program that is to be ended with the ranks."""
        self._spawn(f"{self.run_dir}/{name}", target, env)

    def log_of(self, job: str, generation: int, rank: int) -> str:
        """What the rank has written while it had that place."""
        return self._log(self.name(job, generation, rank)).read_text()

    def is_alive(self, job: str, generation: int, rank: int) -> bool:
        return not self._server.has_ended(self._process(job, generation, rank))

    def name(self, job: str, generation: int, rank: int) -> str:
        return f"{self.run_dir}/{job}/{generation}/{rank}"

    def signal(self, job: str, generation: int, rank: int, signum: int) -> None:
        os.kill(self.pid(job, generation, rank), signum)

    def pid(self, job: str, generation: int, rank: int) -> int:
        return self._started[self._process(job, generation, rank)]

    def stop(self, job: str, generation: int, rank: int) -> None:
        """SIGSTOP, and wait until the kernel says that the process has stopped."""
        self.signal(job, generation, rank, signal.SIGSTOP)
        status = Path(f"/proc/{self.pid(job, generation, rank)}/status")
        deadline = time.monotonic() + DEADLINE_S
        while "State:\tT" not in status.read_text():
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)

    def exit_code(self, job: str, generation: int, rank: int) -> int:
        return self._server.exit_code(self._process(job, generation, rank))

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.run_dir.glob("*.log")))

    def close(self) -> None:
        for name, pid in self._started.items():
            if not self._server.has_ended(name):
                with suppress(ProcessLookupError):  # it may end by itself just now
                    os.kill(pid, signal.SIGKILL)
            self._server.exit_code(name)
        self.agent.close()
        shutil.rmtree(self._short, ignore_errors=True)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an elastic job that nothing happens to."""
    return reference_losses(elastic.job("undisturbed"), tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def ranks(fork_server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    for name in ("run", "store"):
        (tmp_path / name).mkdir()
    team = Ranks(fork_server, tmp_path / "run", (tmp_path / "store").as_uri())
    yield team
    team.close()
    sys.stdout.write(team.logs())
