"""Looks at the node's GPUs every few seconds, as long as there is a driver to ask, and tells what breaks."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from unicron_lib.adapters.nvml import NvmlAbsent, open_nvml
from unicron_lib.agent.messages import GpuFault
from unicron_lib.detection.gpu import GpuReading, GpuWatch

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_S = 5.0
DEADLINE_S = 10.0
RETRY_S = 60.0
"""Until a driver that was not there is asked for again: it may be installed or loaded after the agent has started."""


class GpuDriver(Protocol):
    """What is asked: each GPU in the order of the indices, a lost one included."""

    def read(self) -> Sequence[GpuReading]:
        """Look at every GPU; may block for ever."""


class GpuProbe:
    """Watches the first `num_gpus` GPUs; `life` and `jobs` are asked when something is found, `tell` gets it.

    The driver is asked in one thread at a time, which nobody waits for at the end: calls of a hanging driver never return.
    """

    def __init__(
        self,
        *,
        num_gpus: int,
        life: Callable[[], str],
        jobs: Callable[[], tuple[str, ...]],
        tell: Callable[[GpuFault], None],
        open_driver: Callable[[], GpuDriver | NvmlAbsent] = open_nvml,
        look_s: float = LOOK_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._num_gpus = num_gpus
        self._life = life
        self._jobs = jobs
        self._tell = tell
        self._open_driver = open_driver
        self._look_s = look_s
        self._deadline_s = deadline_s
        self._driver: GpuDriver | NvmlAbsent | None = None
        self._watch = GpuWatch()
        self._noted = ""

    async def run(self) -> None:
        """Look until cancelled; nothing that a driver does ends it."""
        while True:
            try:
                pause_s = await self._look()
            except Exception as error:  # noqa: BLE001 - an agent must outlive its probes
                self._note(logging.WARNING, f"a look at the GPUs failed ({error!r}): another one follows", error)
                pause_s = self._look_s
            await asyncio.sleep(pause_s)

    async def _look(self) -> float:
        """Look once; seconds until the next look."""
        if not self._driver:
            self._driver = await self._patiently(self._open_driver)
        if isinstance(self._driver, NvmlAbsent):
            self._note(logging.INFO, f"GPU health is not watched on this node: {self._driver.reason}")
            return RETRY_S
        readings = (await self._patiently(self._driver.read))[: self._num_gpus]
        for news in self._watch.news(readings, life=self._life()):
            log.warning("%s", news.evidence)
            fault = GpuFault(kind=news.kind, gpu=news.gpu, uuid=news.uuid, evidence=news.evidence, jobs=self._jobs())
            self._tell(fault)
        errors = ", ".join(f"GPU {gpu.index} answers with NVML error {gpu.error_code}" for gpu in readings if gpu.error_code)
        told = f"watching the health of {len(readings)} GPUs"
        self._note(logging.WARNING if errors else logging.INFO, f"{told}: {errors}" if errors else told)
        return self._look_s

    async def _patiently(self, call: Callable[[], T]) -> T:
        """The answer of the driver, however long it takes: a second thread would hang as well."""
        answer = _in_thread(call)
        await asyncio.wait([answer], timeout=self._deadline_s)
        if not answer.done():
            self._note(
                logging.WARNING,
                f"the NVIDIA driver has not answered for {self._deadline_s:g} s: GPU health is not known until it does; "
                "the kernel's log may tell why, a restart of the node cures it",
            )
        return await answer

    def _note(self, level: int, text: str, error: Exception | None = None) -> None:
        """Log how the probe fares, whenever that changes."""
        if text != self._noted:
            self._noted = text
            log.log(level, "%s", text, exc_info=error)


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The answer of `call` from a thread that keeps no process alive, unlike those of an executor."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]  # a result of T may be None itself
        else:
            answer.set_exception(error)

    def work() -> None:
        result, failed = None, None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            failed = error
        with suppress(RuntimeError):  # the loop is closed: the agent has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=work, name="gpu-probe", daemon=True).start()
    return answer
