"""The GPUs as this node's driver shows them, whatever becomes of the process that asks it."""

import asyncio
import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from unicron_lib.agent.probe_life import HANGING, ProbeLife
from unicron_lib.agent.probe_messages import Closed, Look, Opened
from unicron_lib.detection.gpu import GpuReading

log = logging.getLogger(__name__)
DEADLINE_S = 10.0
"""A look takes milliseconds; the driver's own time-outs are shorter than this."""

RETRY_S = 60.0
"""Until a driver that was not there is looked for again, as it may be installed or loaded later; and the longest back-off."""

BACKOFF_S = 1.0
SETTLED_LOOKS = 12
"""Good looks in a row after which the next trouble is a new one, with the shortest back-off."""

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blindness:
    """Nothing is known of the GPUs: there is no driver, it or the probe fails, or it does not answer."""

    why: Literal["no_driver", "failing", "hung"]
    reason: str


class Life(Protocol):
    """What is asked of a `ProbeLife`."""

    @property
    def opened(self) -> Opened | None:
        """What the driver said when it was opened."""

    @property
    def is_gone(self) -> bool:
        """The process has ended."""

    async def look(self, *, deadline_s: float) -> Look | Closed | None:
        """Look at the GPUs; raises TimeoutError."""

    def kill(self) -> None:
        """End the process, if it can be ended."""

    async def bury(self) -> None:
        """End the process and clean up, without waiting for one that does not end."""


def has_library() -> bool:
    """The driver's library is here. It is loaded, which calls nothing in it and cannot hang."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class GpuSight:
    """Asks one probe process at a time, and starts the next only when the last has really ended: never two are stuck."""

    def __init__(
        self,
        *,
        on_xid: Callable[[int, str, int], None],
        deadline_s: float = DEADLINE_S,
        backoff_s: float = BACKOFF_S,
        find: Callable[[], bool] = has_library,
        start: Callable[[Callable[[int, str, int], None]], Life] = lambda on_xid: ProbeLife(on_xid=on_xid),
    ) -> None:
        self._on_xid = on_xid
        self._deadline_s = deadline_s
        self._backoff_s = self._delay_s = backoff_s
        self._find = find
        self._start = start
        self._life: Life | None = None
        self._blind: Blindness | None = None
        self._not_before = 0.0
        self._good_looks = 0
        self._hangs_until = 0.0
        self._is_drill = False

    async def look(self) -> tuple[GpuReading, ...] | Blindness:
        """Look at every GPU, in the order of their indices; answers within the deadline."""
        life = await self._living()
        if life is None:
            assert self._blind is not None
            return self._blind
        begun = life.opened is None
        try:
            answer = await life.look(deadline_s=self._deadline_s)
        except TimeoutError:
            hung = f"the NVIDIA driver has not answered for {self._deadline_s:g} s: the kernel's log may tell why"
            return self._fail(life, Blindness(why="hung", reason=hung))
        if isinstance(answer, Look):
            return self._see(answer, life.opened if begun else None)
        if answer is None:
            return self._fail(life, Blindness(why="failing", reason="the process that asks the NVIDIA driver has died"))
        return self._fail(life, Blindness(why="no_driver" if answer.no_driver else "failing", reason=answer.reason))

    def hang(self, seconds: float) -> None:
        """For a drill: from the next look on, and for so long, each probe process is one that never answers."""
        self._hangs_until = asyncio.get_running_loop().time() + seconds

    async def close(self) -> None:
        """End the probe process; one that is stuck is left to the kernel."""
        if self._life:
            await self._life.bury()

    async def _living(self) -> Life | None:
        """The probe process, a new one if it is time for it; None while there cannot be one."""
        now = asyncio.get_running_loop().time()
        hangs = now < self._hangs_until
        if hangs and not self._is_drill:
            await self.close()
            self._blind = self._blind or Blindness(why="hung", reason="the process that asks the NVIDIA driver does not end")
            self._not_before = 0.0
        if self._life and self._blind is None:
            return self._life
        if now < self._not_before or (self._life and not self._life.is_gone):
            return None
        if self._life:
            await self._life.bury()
            self._life = None
        self._is_drill = hangs
        if not hangs and not self._find():
            self._not_before = now + RETRY_S
            self._blind = Blindness(why="no_driver", reason=f"no NVIDIA driver is installed ({LIBRARY} was not found)")
            return None
        life = ProbeLife(on_xid=self._on_xid, command=HANGING) if hangs else self._start(self._on_xid)
        self._life, self._blind, self._good_looks = life, None, 0
        return self._life

    def _see(self, look: Look, opened: Opened | None) -> tuple[GpuReading, ...]:
        self._good_looks += 1
        if self._good_looks >= SETTLED_LOOKS:
            self._delay_s = self._backoff_s
        if opened:
            log.info("watching the health of %d GPUs, driver %s", len(look.gpus), opened.driver or "unknown")
            for off in opened.off:
                log.info("%s", off)
        return look.gpus

    def _fail(self, life: Life, blind: Blindness) -> Blindness:
        """Give up a process, and wait a little longer each time before the next."""
        life.kill()
        self._blind = blind
        delay_s = RETRY_S if blind.why == "no_driver" else self._delay_s
        self._delay_s = min(2 * self._delay_s, RETRY_S)
        self._not_before = asyncio.get_running_loop().time() + delay_s
        return blind
