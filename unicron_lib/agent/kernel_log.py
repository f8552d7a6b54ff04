"""Listens to the kernel, and to the driver's Xid events, and tells what they say of the node's hardware."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from unicron_lib.agent.gpu_inventory import has_driver, imagined_gpus, listed_gpus
from unicron_lib.agent.log_source import follow
from unicron_lib.agent.messages import GpuFault, NodeNotice
from unicron_lib.detection.findings import Finding, HardwareNotice
from unicron_lib.detection.gpu_names import GpuName
from unicron_lib.detection.kernel_log import OomLine, Said, parse
from unicron_lib.detection.kernel_watch import KernelWatch
from unicron_lib.detection.xid import XidRules, XidWatch

log = logging.getLogger(__name__)
KERNEL_LOG = Path("/dev/kmsg")
TICK_S = 0.25
RETRY_S = 5.0
"""Until a log that cannot be read is tried again."""
RETELL_S, RETOLD = 600.0, 64
"""How old a fault may be, and how many, to be told again by a new life of the agent."""


class KernelLog:
    """Follows the log `source`, None for none; `jobs` and `life` are asked when something is found, `tell` gets it.

    The log is read by a thread, which nobody waits for at the end: a read from a broken disk never returns. `oom` gets the
    process ids that the kernel says it has killed for memory.
    """

    def __init__(
        self,
        *,
        source: Path | None,
        num_gpus: int,
        jobs: Callable[[], tuple[str, ...]],
        life: Callable[[], str],
        tell: Callable[[GpuFault | NodeNotice], None],
        oom: Callable[[int], None],
        rules: XidRules | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._source = source
        self._jobs = jobs
        self._life = life
        self._tell = tell
        self._oom = oom
        self._root = root
        self._watch = KernelWatch(num_gpus=num_gpus, xids=XidWatch(rules))
        self._watch.learn(listed_gpus(root) if has_driver(root) else imagined_gpus(num_gpus))
        self._stop = threading.Event()
        self._blind = ""
        self._blind_told_in: str | None = None
        self._told: deque[tuple[str, float, GpuFault]] = deque(maxlen=RETOLD)

    async def run(self) -> None:
        """Listen until cancelled."""
        if self._source is None:
            log.info("the kernel's log is not watched on this node: it was asked for none")
        else:
            reading = (self._source, asyncio.get_running_loop())
            threading.Thread(target=self._read, args=reading, name="kernel-log", daemon=True).start()
        try:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    self._tick()
                except Exception:  # an agent must outlive its probes
                    log.exception("what the kernel said could not be told")
        finally:
            self._stop.set()

    def inject(self, line: str) -> None:
        """Take in a line as if the kernel had written it."""
        log.warning("injected into the kernel's log: %s", line)
        if said := parse(line):
            self._hear([said])

    def on_xid(self, gpu_index: int, uuid: str, code: int) -> None:
        """Take in an Xid that the driver told by an event of its own; the log tells of it as well, which changes nothing."""
        name = GpuName(index=gpu_index, uuid=uuid)
        self._watch.names.learn(name)
        self._tell_all(self._watch.hear_xid(name, code, time.monotonic()))

    def address_of(self, gpu: int) -> str:
        """The PCI address of a GPU as the driver writes it, for lines to be injected; empty if there is no such GPU."""
        return self._watch.names.of_index(gpu).pci

    def _tick(self) -> None:
        self._tell_again()
        self._tell_blindness()
        self._tell_all(self._watch.due(time.monotonic()))

    def _hear(self, batch: Iterable[Said]) -> None:
        now = time.monotonic()
        for said in batch:
            if isinstance(said, OomLine):
                log.warning("the kernel has killed process %d (%s) for memory", said.pid, said.name)
                self._oom(said.pid)
            self._tell_all(self._watch.hear(said, now))

    def _tell_all(self, findings: Iterable[Finding]) -> None:
        for found in findings:
            if isinstance(found, HardwareNotice):
                log.warning("%s", found.text)
                self._tell(NodeNotice(code=found.code, text=found.text, active=found.active))
                continue
            log.warning("%s", found.evidence)
            fault = GpuFault(**asdict(found), jobs=self._jobs())
            self._tell(fault)
            if not fault.symptom:
                self._told.append((self._life(), time.monotonic(), fault))

    def _tell_again(self) -> None:
        """In a new life: what the old one said lately may have gone down with it."""
        life, now = self._life(), time.monotonic()
        for _ in range(len(self._told)):
            told_in, at, fault = self._told.popleft()
            if now - at > RETELL_S:
                continue
            if told_in != life:
                self._tell(replace(fault, jobs=self._jobs()))
            self._told.append((life, at, fault))

    def _read(self, source: Path, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: what is meant for us goes to the loop, batch by batch, none before the last one was taken."""
        opened, missing = partial(loop.call_soon_threadsafe, self._sees, source), False
        with suppress(RuntimeError):  # the loop is closed: the agent has ended meanwhile
            while not self._stop.is_set():
                try:
                    for lines in follow(source, self._stop.wait, opened, from_start=missing):
                        if batch := [said for line in lines if (said := parse(line))]:
                            self._hand_over(batch, loop)
                except OSError as error:
                    missing = isinstance(error, FileNotFoundError)
                    loop.call_soon_threadsafe(self._is_blind, f"{source} cannot be read: {error.strerror}")
                    self._stop.wait(RETRY_S)

    def _hand_over(self, batch: list[Said], loop: asyncio.AbstractEventLoop) -> None:
        taken = threading.Event()

        def take() -> None:
            try:
                self._hear(batch)
            finally:
                taken.set()

        loop.call_soon_threadsafe(take)
        while not taken.wait(TICK_S) and not self._stop.is_set():
            pass

    def _sees(self, source: Path) -> None:
        log.info("following the kernel's log %s", source)
        if self._blind_told_in is not None:
            self._tell(NodeNotice(code="kernel_log_blind", text=f"{source} is read again", active=False))
        self._blind, self._blind_told_in = "", None

    def _is_blind(self, reason: str) -> None:
        if reason != self._blind:
            self._blind = reason
            log.warning("the kernel's log is not watched on this node: %s", reason)
        self._tell_blindness()

    def _tell_blindness(self) -> None:
        """Once in each life, and only where a driver would have something to say there."""
        if self._blind and self._blind_told_in != self._life() and has_driver(self._root):
            self._blind_told_in = self._life()
            self._tell(NodeNotice(code="kernel_log_blind", text=self._blind))
