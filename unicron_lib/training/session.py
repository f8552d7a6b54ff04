"""Three lines by which any training script tells Unicron how it is, and is asked to stop in time.

    from unicron_lib.training.session import session

    with session() as run:
        for step in range(start, steps):
            ...
            run.step(step, loss=loss)
            if run.should_stop:
                save(); break

Two more, around all that talks with other ranks, and it keeps its process when they change (`parks: true` in its job):

        for attempt in run.attempts():
            with attempt:
                init_process_group(); take the newest state that any rank has; train

Started otherwise, by torchrun or by hand, all this does nothing. Imports neither torch nor megatron.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, SupportsFloat

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.error_file import leave_error
from unicron_lib.agent.rank_messages import RankDrained, RankHello, RankParked
from unicron_lib.detection.sections import Section
from unicron_lib.training.abort import Breaker
from unicron_lib.training.environment import LOG_FILE, RankEnvironment, read_environment, replace_environment
from unicron_lib.training.last_words import last_words
from unicron_lib.training.output import write_to
from unicron_lib.training.parking import Attempt, AttemptEnded, Parking
from unicron_lib.training.progress_lines import ProgressLines
from unicron_lib.training.session_link import SessionLink
from unicron_lib.training.stopping import CommonStop

log = logging.getLogger(__name__)
LOOK_S = 0.2
"""How often a parked script looks whether it was terminated."""
TERMINATED = 128 + signal.SIGTERM
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

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """One block to train in, and another one each time that the job's ranks have changed; once outside of Unicron.

        A block that ends by itself is the last one. It may be left, in the middle of a collective or of `step`, when ranks are
        lost or moved; the next one begins with torchrun's variables set anew and without a process group. What a
        rank has in memory stays, its device, too; a new one begins with nothing. Any other exception is not caught. Needs
        `parks: true` in the job; ends the process if it has no place any more.
        """
        yield nullcontext()


class _Reporting(Session):
    """The session of a rank that an agent has started."""

    def __init__(self, env: RankEnvironment, link: SessionLink) -> None:
        self.pid = os.getpid()
        self._link = link
        self._parking: Parking | None = None
        self._take_place(env)
        self._iteration = -1
        self._since = time.monotonic()
        self._paused_s = 0.0
        self._is_terminated = False
        link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=self.pid))

    def _take_place(self, env: RankEnvironment, **origin: str) -> None:
        self._env = env
        self._beats = BeatWriter.open(env.beat_file)
        self._stop, self._park = CommonStop(env), CommonStop(env, "park")
        self._progress = ProgressLines(env, self._link.send_line, **origin)
        self._is_to_stop = False

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
        self._progress.tell(int(step), loss=told_loss, iteration_s=duration_s, flops=float(flops) / duration_s)
        if self._parking is not None:
            self._leave_if_ordered(self._parking, step)
        self._is_to_stop = self._stop.is_due(step, asked=self._is_asked)

    def _leave_if_ordered(self, parking: Parking, step: int) -> None:
        if parking.is_now or self._park.is_due(step, asked=parking.is_asked):
            raise AttemptEnded

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        if not self._env.spec.parks:
            yield nullcontext()
            return
        env = self._env
        self._parking = parking = self._link.parking = Parking(Breaker(_abort_groups), self._link.send)
        self._link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=self.pid, parks=True))
        try:
            while True:
                attempt = Attempt(parking, partial(self._say_parked, parking))
                yield attempt
                if not attempt.is_interrupted:
                    return
                _leave_groups()  # the error is gone by now, and with it what would keep their connections open
                self._wait(parking)
        finally:
            self._parking = None
            parking.end()

    def _say_parked(self, parking: Parking, error: BaseException | None) -> None:
        env, iteration = self._env, self._iteration
        parked = RankParked(job=env.job, generation=env.generation, rank=env.rank, iteration=iteration, micro_batches=0)
        failure = last_words(error, env, iteration=iteration, parked=True) if error else None
        self._beats.mark(Section.PARKED)
        parking.park(parked, failure)
        why = f"{failure.error_type}: {failure.message}" if failure else "as it was told"
        log.warning("the rank parks after step %d, %s", iteration, why)

    def _wait(self, parking: Parking) -> None:
        """Until the rank has a place again; raises SystemExit if it gets none."""
        while (order := parking.next_order(LOOK_S)) is None:
            if self._is_terminated:
                raise SystemExit(TERMINATED)
        if order.order == "quit":
            raise SystemExit(0)
        self._take_place(replace_environment(os.environ, order.environment), source="own memory")
        write_to(os.environ.get(LOG_FILE))
        self._since, self._paused_s = time.monotonic(), 0.0

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


def _abort_groups() -> None:
    if _has_groups():
        from unicron_lib.training.groups import abort_groups

        abort_groups()


def _leave_groups() -> None:
    if _has_groups():
        from unicron_lib.training.groups import leave

        leave()


def _has_groups() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available()


def _section(name: str) -> Section:
    if name not in SECTIONS:
        raise ValueError(f"there is no section {name!r}: the sections are {', '.join(SECTIONS)}")
    return SECTIONS[name]
