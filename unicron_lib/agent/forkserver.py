"""A thread-free process that imports slow modules once and forks ranks from there.

`python -m unicron_lib.agent.forkserver --preload torch --fd 7` serves JSON lines on the inherited stream socket 7:

in    `{"id": "r0", "target": "module:function", "env": {...}, "log": "/path"}`
out   `{"event": "ready"}`, or `{"event": "broken", "error": ...}` when an import fails, then for each request
      `{"event": "spawned", "id", "pid"}` and, the moment it ends, `{"event": "exited", "id", "pid", "code"}`
      (negative for a signal), or `{"event": "refused", "id", "error"}` when the fork itself fails.

A child has a session, an environment and a log of its own and dies with the fork server, which dies with its parent.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from unicron_lib.agent.error_file import leave_error
from unicron_lib.agent.exception_text import message_of, stack_of
from unicron_lib.agent.lives import life_of
from unicron_lib.agent.marks import own_descendants

HANDLED = (signal.SIGCHLD, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` when the process `parent` ends; exits at once if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """Serves one connection until it closes; `serve` returns then, and nothing of its children is left."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._children: dict[int, str] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._ended = False

    def serve(self) -> None:
        """Answer requests until the connection closes or SIGTERM comes."""
        for signum in HANDLED:
            signal.signal(signum, lambda *_: None)  # the numbers arrive through the wake-up socket
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's to handle
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        try:
            while not self._ended:
                for key, _ in self._selector.select():
                    self._read_requests() if key.fileobj is self._connection else self._read_signals()
        finally:
            for pid in self._children:
                kill_group(pid)

    def send(self, message: Mapping[str, object]) -> None:
        """Tell the other side; a closed connection is noticed by the loop."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _read_requests(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self._ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._spawn(json.loads(line))

    def _read_signals(self) -> None:
        if signal.SIGTERM in self._wake_read.recv(4096):
            self._ended = True
        self._reap()

    def _reap(self) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # While the child is a zombie its group's number cannot be anybody else's.
            kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            name = self._children.pop(ended.si_pid, "")
            code = os.waitstatus_to_exitcode(status)
            self.send({"event": "exited", "id": name, "pid": ended.si_pid, "code": code})

    def _spawn(self, request: Mapping[str, object]) -> None:
        parent = os.getpid()
        # A signal for the child must not reach it while it still shares our wake-up socket.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_child(parent, request)
        except OSError as error:
            self.send({"event": "refused", "id": request["id"], "error": f"cannot fork: {error.strerror}"})
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._children[pid] = str(request["id"])
        self.send({"event": "spawned", "id": request["id"], "pid": pid})

    def _become_child(self, parent: int, request: Mapping[str, object]) -> NoReturn:
        code = 1
        try:
            os.setsid()
            die_with_parent(parent)
            own_descendants(str(life_of(os.getpid())))
            self._let_go()
            environment = request["env"]
            assert isinstance(environment, dict)
            os.environ.update(environment)
            _redirect_output(str(request["log"]))
            code = _run(str(request["target"]))
        except BaseException:  # noqa: BLE001  # nothing may escape into the server's own loop
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        for signum in HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._selector.close()
        for own in (self._connection, self._wake_read, self._wake_write):
            own.close()


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal the process group led by `pid`; a group that is gone is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def _redirect_output(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run(target: str) -> int:
    module, _, function = target.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)()
    except SystemExit as exiting:
        code = exiting.code
        if isinstance(code, str):
            print(code, file=sys.stderr)  # noqa: T201  # as the interpreter does
            return 1
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        leave_error(f"{type(error).__name__}: {message_of(error)}", stack_of(error))
        traceback.print_exc()
        return 1
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Import, tell that all is ready, serve."""
    parser = argparse.ArgumentParser(prog="python -m unicron_lib.agent.forkserver", description=__doc__)
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args(arguments)
    parent = os.getppid()
    die_with_parent(parent)
    server = ForkServer(socket.socket(fileno=options.fd))
    try:
        for module in options.preload:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # whatever a module raises is the answer
        traceback.print_exc()
        server.send({"event": "broken", "error": f"cannot import {module}: {type(error).__name__}: {error}"})
        return 1
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        # A lock that one of them holds at the time of a fork stays locked in the child for ever.
        print(f"{threads} threads run after the imports: forked ranks may hang", file=sys.stderr, flush=True)  # noqa: T201
    gc.collect()
    gc.freeze()  # children share these pages for as long as nobody collects them
    # From here on the end is ours to bring about, since only we can take the children's own children along.
    die_with_parent(parent, signal.SIGTERM)
    server.send({"event": "ready"})
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
