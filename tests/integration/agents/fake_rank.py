"""A rank without torch: speaks the agent's protocol and does what `data_path` of its job asks for."""

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

STEP_S = 0.02


class Wire:
    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["UNICRON_AGENT_SOCKET"])
        self.orders: queue.Queue[str | None] = queue.Queue()
        self.environment: dict[str, str] = {}
        self.become(dict(os.environ))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.socket.makefile("rb"):
            order = json.loads(line)
            self.environment = order["environment"]
            self.orders.put(order["order"])
        self.orders.put(None)

    def become(self, environment: dict[str, str]) -> None:
        self.identity = {
            "job": environment["UNICRON_JOB_ID"],
            "generation": int(environment["UNICRON_GENERATION"]),
            "rank": int(environment["RANK"]),
        }
        self.world_size = int(environment["WORLD_SIZE"])

    def say(self, kind: str, **more: object) -> None:
        self.socket.sendall(json.dumps({"type": kind, **self.identity, **more}).encode() + b"\n")

    def progress(self, iteration: int, loss: float = 1.0, compute_s: float = STEP_S, **more: object) -> None:
        world_size = self.world_size
        self.say(
            "progress",
            iteration=iteration,
            loss=loss,
            iteration_s=STEP_S,
            compute_s=compute_s,
            flops=1e9 * world_size,
            world_size=world_size,
            at=time.time(),
            **more,
        )

    def failed(self, iteration: int, *, parked: bool, message: str = "asked to") -> None:
        self.say("rank_failed", iteration=iteration, error_type="RuntimeError", message=message, traceback="...", parked=parked)


def main() -> int:
    spec = json.loads(os.environ["UNICRON_JOB_SPEC"])
    behaviour = spec["data_path"].removeprefix("fake:")
    if behaviour == "mute":
        signal.pause()
    wire = Wire()
    wire.say("rank_hello", pid=os.getpid())
    sys.stdout.write(f"hello from {wire.identity}\n")
    return BEHAVIOURS[behaviour](wire)


def alone(wire: Wire) -> int:
    """Steps without collectives: nobody needs anybody."""
    return step(wire, compute_s=0.0)


def step(wire: Wire, iteration: int = 0, compute_s: float = STEP_S) -> int:
    """Do iterations until an order comes."""
    while True:
        wire.progress(iteration, compute_s=compute_s)
        try:
            order = wire.orders.get(timeout=STEP_S)
        except queue.Empty:
            iteration += 1
            continue
        if order == "drain":
            wire.say("rank_drained", iteration=iteration, manifest=f"manifest-{iteration}")
            return 0
        if order == "nan":
            wire.progress(iteration + 1, float("nan"))
            signal.pause()
        if order == "raise":
            wire.failed(iteration, parked=False)
            return 1
        if order is None:
            return 1


def park(wire: Wire) -> int:
    """Do one iteration, then behave like a survivor of a collective error; rank 0 has a state that it can save."""
    wire.progress(0)
    wire.failed(0, parked=True)
    while True:
        order = wire.orders.get()
        if order == "save_replica":
            wire.say("rank_drained", iteration=0, manifest=None if wire.identity["rank"] else "manifest-replica")
        if order in {"quit", None}:
            return 0


def live_on(wire: Wire) -> int:
    """Steps, parks when it is told to, and goes on as whom it is told to be."""
    iteration, source = 0, ""
    while True:
        wire.progress(iteration, source=source)
        try:
            order = wire.orders.get(timeout=STEP_S)
        except queue.Empty:
            iteration += 1
            continue
        while order in {"park", "abort", "save_replica"}:
            if order == "save_replica":
                wire.say("rank_drained", iteration=iteration, manifest=f"as {wire.environment['UNICRON_GENERATION']}")
            else:
                wire.say("rank_parked", iteration=iteration, micro_batches=2)
            order = wire.orders.get()
        if order == "assign":
            late = wire.identity
            wire.become(wire.environment)
            Path(wire.environment["UNICRON_LOG_FILE"]).write_text(json.dumps(wire.environment))
            wire.socket.sendall(
                json.dumps({"type": "rank_parked", **late, "iteration": 0, "micro_batches": 0}).encode() + b"\n"
            )
            iteration, source = iteration + 1, "own memory"
        elif order in {"quit", None}:
            return 0


def deaf(wire: Wire) -> int:
    """Does one iteration and obeys no order."""
    wire.progress(0)
    while True:
        signal.pause()


def fail_at_once(wire: Wire) -> int:
    wire.failed(-1, parked=False, message="x" * 200_000)
    return 1


def finish(wire: Wire) -> int:
    wire.progress(0)
    wire.say("rank_finished", iteration=0, loss=1.0)
    return 0


def exit_16(wire: Wire) -> int:
    wire.progress(0)
    sys.exit(16)


def parent(wire: Wire) -> int:
    """Leaves the agent's view with its children: one forked, one a program of its own, each in its own session."""
    forked = os.fork()
    if forked == 0:
        os.setsid()  # and keeps the parent's connection to the agent
        while True:
            signal.pause()
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    name = f"children-{wire.identity['job']}"
    Path(os.environ["UNICRON_RUN_DIR"], name).write_text(f"{forked} {program.pid}")
    return step(wire)


def flood(wire: Wire) -> int:
    """Says too much, and much of it wrong, then goes on as if nothing was."""
    for number in range(10_000):
        wire.failed(0, parked=True, message=f"distinct {number}" if number % 5 == 0 else "the same")
    for line in (b"{}", b"no JSON", b"\xff\x00\xfe", b"[" * 10_000, b'{"type": "rank_finished", "job": "of others"}', b""):
        wire.socket.sendall(line + b"\n")
    for message in ("huge", "huge too"):
        text = message + "x" * 50_000_000
        wire.say("rank_failed", iteration=0, error_type=message, message=text, traceback="t", parked=False)
    wire.say("rank_failed", iteration=0, error_type="Last", message="m", traceback="t" * 900_000, parked=True)
    wire.say("rank_drained", iteration=7, manifest=None)
    signal.pause()
    return 0


def raise_without_words(_: Wire) -> int:
    raise KeyError("input_ids")


def segfault(_: Wire) -> int:
    ctypes.string_at(0)
    return 0


def obstinate(wire: Wire) -> int:
    """Has a child of its own and ignores SIGTERM."""
    child = os.fork()
    if child == 0:
        wire.socket.close()
        signal.pause()
    Path(os.environ["UNICRON_RUN_DIR"], "grandchild").write_text(str(child))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wire.progress(0)
    while True:
        signal.pause()


BEHAVIOURS = {
    "step": step,
    "alone": alone,
    "park": park,
    "live_on": live_on,
    "deaf": deaf,
    "fail": fail_at_once,
    "finish": finish,
    "exit16": exit_16,
    "obstinate": obstinate,
    "parent": parent,
    "flood": flood,
    "raise": raise_without_words,
    "segfault": segfault,
}


def rendezvous() -> None:
    """A store that only has a port."""
    listener = socket.create_server((os.environ["MASTER_ADDR"], 0))
    path = Path(os.environ["UNICRON_PORT_FILE"])
    path.with_suffix(".new").write_text(json.dumps({"port": listener.getsockname()[1]}))
    path.with_suffix(".new").rename(path)
    signal.pause()
