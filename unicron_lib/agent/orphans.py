"""Processes that outlive the rank or the agent they belong to: found by their marks, ended before a rank starts.

The fork server, and so everything that descends from it, carries in its environment who its agent is and on which node; each
process that it forks adds itself as the owner of what descends from it. What overwrites its environment is still in
the agent's register of what it has started.
"""

import asyncio
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.lives import Life, is_alive, life_of, marks_of
from unicron_lib.agent.marks import AGENT, BLANK_OWNER, NODE, OWNER, RUN_DIR
from unicron_lib.agent.register import Register, read_register
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
END_TIMEOUT_S = 5.0
"""How long the kernel may take to end what was killed; a driver can hold a process for ever."""
MAX_ROUNDS = 5
"""An orphan can fork while the others are being looked for."""


class Orphans:
    """Ends what is left over of former lives of this node's agent, and of this life's dead ranks."""

    def __init__(self, facts: NodeFacts) -> None:
        me = life_of(os.getpid())
        assert me is not None
        self._directory = facts.run_dir / "agents"
        self._marks = {NODE: facts.node, RUN_DIR: str(facts.run_dir)}
        self._register = Register(self._directory / f"{facts.node}-{me.pid}.pids", node=facts.node, agent=me)
        self._me = me
        self._clearing = asyncio.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """What marks a fork server of this agent."""
        return self._marks | {AGENT: str(self._me), OWNER: BLANK_OWNER}

    def note(self, pid: int) -> None:
        """Remember beyond the agent's death that it has started `pid`."""
        life = life_of(pid)
        if life is not None:
            self._register.add(life)

    async def clear(self) -> None:
        """End all orphans; raises AgentError when one of them does not end."""
        async with self._clearing:
            await asyncio.to_thread(self._clear)

    def close(self) -> None:
        """Forget the register: nothing that it names is left."""
        self._register.close()

    def _clear(self) -> None:
        self._clear_registered()
        for _ in range(MAX_ROUNDS):
            orphans = [life for pid in _own_processes() if self._is_orphan(pid) and (life := life_of(pid))]
            if not orphans:
                return
            log.warning("ending %d left-over processes: %s", len(orphans), ", ".join(str(life.pid) for life in orphans))
            _end(life for life in orphans if self._is_orphan(life.pid))
        raise AgentError("left-over processes keep starting new ones: look for what was started by a rank that is gone")

    def _clear_registered(self) -> None:
        """What former agents of this node have registered."""
        for path in self._directory.glob(f"{self._marks[NODE]}-*.pids"):
            left = read_register(path, node=self._marks[NODE])
            if left is None or is_alive(left.agent):
                continue
            _end(left.started)
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)

    def _is_orphan(self, pid: int) -> bool:
        """Whether its agent is dead, or it is ours and its owner is dead."""
        marks = marks_of(pid)
        if pid == self._me.pid or any(marks.get(name) != value for name, value in self._marks.items()):
            return False
        agent, owner = Life.read(marks.get(AGENT, "")), Life.read(marks.get(OWNER, ""))
        if agent is None:
            return False
        return not is_alive(agent) or (agent == self._me and owner is not None and not is_alive(owner))


def _own_processes() -> Iterator[int]:
    """The processes of our user."""
    mine = os.geteuid()
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == mine:
                yield int(entry.name)


def _end(lives: Iterable[Life]) -> None:
    """SIGKILL, to nobody who has got the number of somebody else since; raises AgentError if one does not end in time."""
    deadline = time.monotonic() + END_TIMEOUT_S
    with ExitStack() as stack:
        killed: dict[int, Life] = {}
        for life in lives:
            with suppress(ProcessLookupError, PermissionError):
                handle = os.pidfd_open(life.pid)
                stack.callback(os.close, handle)
                if is_alive(life):  # looked at after the handle was there, so the handle is this life's
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed[handle] = life
        for handle, life in killed.items():
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise AgentError(f"process {life.pid}, left over on this node, does not end on SIGKILL: restart the node")
