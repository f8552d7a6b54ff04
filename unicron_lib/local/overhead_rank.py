"""A rank that does real work on the processor, in blocks of iterations that are monitored and blocks that are not.

While it is not monitored its agent is stopped, with all its probes: the difference is what monitoring costs, everything
included.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

import psutil

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import RankFinished, RankHello
from unicron_lib.detection.sections import Section
from unicron_lib.training.environment import RankEnvironment, read_environment
from unicron_lib.training.link import AgentLink
from unicron_lib.training.progress_lines import ProgressLines

ITERATIONS = 5
"""Of a block: so short that a neighbour's load, which comes and goes within seconds, is in both blocks of a pair."""
PARTS = 4
"""Micro-batches of an iteration, each with its sign of life: as many as a rank of the demo has."""
CHUNK = bytes(64 << 10)
CALIBRATION_S = 0.5
RESULTS = "overhead.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Seconds of one block: on the clock, and processor time of this thread, of the agent with its probes, and of telling.

    Telling is what this thread does for being monitored.
    """

    monitored: bool
    wall_s: float
    thread_s: float
    agent_s: float = 0.0
    telling_s: float = 0.0


def main() -> int:
    """Measure `train_iters` pairs of blocks, iterations of `pace_s` each; the results go into the run directory."""
    env = read_environment(os.environ)
    link = AgentLink(env.agent_socket)
    link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=os.getpid()))
    monitor = Monitor(env, link)
    work = _calibrated(env.spec.pace_s / PARTS)
    blocks = [block for pair in range(env.spec.train_iters) for block in _pair(pair, work, monitor)]
    (env.run_dir / RESULTS).write_text(json.dumps([asdict(block) for block in blocks]))
    link.send(RankFinished(job=env.job, generation=env.generation, rank=env.rank, iteration=monitor.iteration, loss=1.0))
    return 0


class Monitor:
    """What a training rank does for being monitored, and the processes that monitor it."""

    def __init__(self, env: RankEnvironment, link: AgentLink) -> None:
        self.iteration = -1
        self.spent_s = 0.0
        self._progress = ProgressLines(env, link.send_line)
        self._link = link
        self._beats = BeatWriter.open(env.beat_file)
        self._agent = psutil.Process(os.getppid()).parent()

    def part_done(self) -> None:
        """A micro-batch is done."""
        began = time.thread_time()
        self._beats.mark()
        self.spent_s += time.thread_time() - began

    def iteration_done(self, iteration_s: float) -> None:
        """An iteration is done."""
        began = time.thread_time()
        self.iteration += 1
        self._beats.mark(Section.COLLECTIVE)
        self._beats.complete(self.iteration, iteration_s)
        self._beats.mark(Section.STEP)
        self._link.take_fault()
        self._progress.tell(
            self.iteration, loss=1.0, iteration_s=iteration_s, flops=1e9 / iteration_s, compute_s=iteration_s, grad_norm=1.0
        )
        self.spent_s += time.thread_time() - began

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While the block runs nobody monitors."""
        watchers = self._watchers()
        _signal(watchers, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(watchers, signal.SIGCONT)

    def cpu_s(self) -> float:
        """Processor time that the agent and its probes have used."""
        times = [process.cpu_times() for process in self._watchers()]
        return sum(used.user + used.system for used in times)

    def _watchers(self) -> Sequence[psutil.Process]:
        """The agent and its children, except the fork server, whose child this process is."""
        if self._agent is None:
            return ()
        return [self._agent, *(child for child in self._agent.children() if child.pid != os.getppid())]


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _pair(number: int, work: Callable[[], None], monitor: Monitor) -> list[Block]:
    """A monitored block and one that is not; which comes first alternates."""
    blocks = []
    for monitored in (True, False) if number % 2 else (False, True):
        if monitored:
            before_s = monitor.cpu_s()
            block = _block(work, monitor)
            blocks.append(replace(block, agent_s=monitor.cpu_s() - before_s))
        else:
            with monitor.absent():
                blocks.append(_block(work, None))
    return blocks


def _block(work: Callable[[], None], monitor: Monitor | None) -> Block:
    told_s = monitor.spent_s if monitor else 0.0
    began, thread_began = time.monotonic(), time.thread_time()
    for _ in range(ITERATIONS):
        started = time.monotonic()
        for _ in range(PARTS):
            work()
            if monitor:
                monitor.part_done()
        if monitor:
            monitor.iteration_done(time.monotonic() - started)
    wall_s, thread_s = time.monotonic() - began, time.thread_time() - thread_began
    telling_s = monitor.spent_s - told_s if monitor else 0.0
    return Block(monitored=monitor is not None, wall_s=wall_s, thread_s=thread_s, telling_s=telling_s)


def _calibrated(part_s: float) -> Callable[[], None]:
    """A fixed amount of work that takes about `part_s` on an idle processor."""
    _hash(1)
    chunks, began = 0, time.thread_time()
    while time.thread_time() - began < CALIBRATION_S:
        _hash(1)
        chunks += 1
    needed = max(1, round(chunks * part_s / (time.thread_time() - began)))
    return lambda: _hash(needed)


def _hash(chunks: int) -> None:
    digest = hashlib.blake2b()
    for _ in range(chunks):
        digest.update(CHUNK)
