"""Three lines by which any training script tells Unicron how it is, and is asked to stop in time.

    from unicron_lib.training.session import session

    with session() as run:
        for step in range(start, steps):
            ...
            run.step(step, loss=loss)
            if run.should_stop:
                save(); break

Started otherwise, by torchrun or by hand, all this does nothing. Imports neither torch nor megatron.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, SupportsFloat

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.error_file import leave_error
from unicron_lib.agent.rank_messages import RankDrained, RankHello
from unicron_lib.detection.sections import Section
from unicron_lib.training.environment import RankEnvironment, read_environment
from unicron_lib.training.last_words import last_words
from unicron_lib.training.progress_lines import ProgressLines
from unicron_lib.training.session_link import SessionLink
from unicron_lib.training.stopping import CommonStop

SECTIONS = {it.value: it for it in (Section.SETUP, Section.EVAL, Section.CHECKPOINT)}


class Session:
    """What a script says and asks outside of Unicron: nothing happens, and it is never to stop."""

    @property
    def should_stop(self) -> bool:
        """Whether to save and leave the loop now. All ranks of a torch process group are told after the same step."""
        return False

    def step(self, step: int, *, loss: SupportsFloat | None = None, flops: float = 0.0) -> None:
        """Step number `step` (rising, the first is 0) is done.

        Call it on every rank, once an optimizer step. `loss` is for people. `flops` is the FLOP of the step over all ranks:
        with it, plans know how fast the job is on so many GPUs.
        """

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """While the block runs, the rank may be silent for as long as its job's `section_timeouts_s` allow.

        `name` is `checkpoint`, `eval` or `setup`; raises ValueError for any other.
        """
        _section(name)
        yield


class _Reporting(Session):
    """The session of a rank that an agent has started."""

    def __init__(self, env: RankEnvironment, link: SessionLink) -> None:
        self.pid = os.getpid()
        self._env = env
        self._link = link
        self._beats = BeatWriter.open(env.beat_file)
        self._stop = CommonStop(env)
        self._lines = ProgressLines(env)
        self._iteration = -1
        self._since = time.monotonic()
        self._paused_s = 0.0
        self._is_to_stop = self._is_terminated = False
        link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=self.pid))

    @property
    def should_stop(self) -> bool:
        return self._is_to_stop or (self._is_asked and not self._stop.is_common)

    def step(self, step: int, *, loss: SupportsFloat | None = None, flops: float = 0.0) -> None:
        duration_s = self._take_time()
        self._link.suffer(duration_s)
        self._iteration = step
        self._beats.complete(step, duration_s)
        self._beats.mark(Section.STEP)
        told_loss = 0.0 if loss is None else float(loss)
        line = self._lines.line(int(step), loss=told_loss, iteration_s=duration_s, flops=float(flops) / duration_s)
        self._link.send_line(line)
        self._is_to_stop = self._stop.is_due(step, asked=self._is_asked)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        entered = time.monotonic()
        self._beats.mark(_section(name))
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - entered
            self._beats.mark(Section.STEP)

    def report(self, error: BaseException) -> None:
        """Tell of the exception that ends the script."""
        told = last_words(error, self._env, iteration=self._iteration)
        self._link.send(told)
        leave_error(f"{told.error_type}: {told.message}", told.traceback)

    def close(self) -> None:
        """The script leaves the session, and says so if it was asked to: exit code 0 means then that it is not finished."""
        self._beats.mark(Section.DRAINING)
        if self.should_stop:
            env = self._env
            self._link.send(
                RankDrained(job=env.job, generation=env.generation, rank=env.rank, iteration=self._iteration, manifest=None)
            )

    @contextmanager
    def heeding_sigterm(self) -> Iterator[None]:
        """While the block runs, SIGTERM asks for a stop; what the script itself does on it is done as well."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return
        before = signal.getsignal(signal.SIGTERM)

        def heed(signum: int, frame: FrameType | None) -> None:
            self._is_terminated = True
            if callable(before):
                before(signum, frame)

        signal.signal(signal.SIGTERM, heed)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

    @property
    def _is_asked(self) -> bool:
        return self._is_terminated or self._link.is_draining

    def _take_time(self) -> float:
        """Seconds since the last step, without sections."""
        now = time.monotonic()
        duration_s = max(now - self._since - self._paused_s, 1e-9)
        self._since, self._paused_s = now, 0.0
        return duration_s


_present: _Reporting | None = None
"""A process has one connection to its agent, however often it opens a session."""


@contextmanager
def session() -> Iterator[Session]:
    """The script's session; in a process that no agent has started, one that does nothing.

    An exception that leaves the block is reported. Raises UserError if the agent's variables are damaged.
    """
    found = _reporting(dict(os.environ))
    if found is None:
        yield Session()
        return
    with found.heeding_sigterm():
        try:
            yield found
        except SystemExit:
            found.close()
            raise
        except BaseException as error:
            found.report(error)
            raise
        found.close()


def _reporting(variables: dict[str, Any]) -> _Reporting | None:
    global _present  # noqa: PLW0603 - it is the process's
    if _present is not None:
        return _present if _present.pid == os.getpid() else None  # a forked child is not the rank
    if "UNICRON_AGENT_SOCKET" not in variables:
        return None
    env = read_environment(variables)
    link = SessionLink.connect(env.agent_socket)
    _present = _Reporting(env, link) if link else None
    return _present


def _section(name: str) -> Section:
    if name not in SECTIONS:
        raise ValueError(f"there is no section {name!r}: the sections are {', '.join(SECTIONS)}")
    return SECTIONS[name]
