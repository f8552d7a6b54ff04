"""Looks at the node's GPUs every few seconds and tells what breaks and what a person should know."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from unicron_lib.agent.gpu_injection import GpuInjections, Injected
from unicron_lib.agent.gpu_sight import Blindness
from unicron_lib.agent.messages import GpuFault, NodeNotice
from unicron_lib.detection.gpu import GpuFinding, GpuReading
from unicron_lib.detection.gpu_notices import NoticeBoard, Sign, signs
from unicron_lib.detection.gpu_watch import GpuInventory, GpuWatch
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
LOOK_S = 5.0
WHO = "the GPU probe"


class Sight(Protocol):
    """What looks at the GPUs; see `GpuSight`."""

    async def look(self) -> tuple[GpuReading, ...] | Blindness:
        """Every GPU, in the order of their indices, or why nothing is known."""

    def hang(self, seconds: float) -> None:
        """For a drill: from the next look on, and for so long, be one that gets no answer."""

    async def close(self) -> None:
        """Let go of the driver."""


class GpuProbe:
    """Watches the first `num_gpus` GPUs; `life` and `jobs` are asked when something is found, `tell` gets it.

    With `has_gpus` there must be that many. Nothing is concluded from what cannot be seen.
    """

    def __init__(
        self,
        *,
        num_gpus: int,
        has_gpus: bool,
        life: Callable[[], str],
        jobs: Callable[[], tuple[str, ...]],
        tell: Callable[[GpuFault | NodeNotice], None],
        sight: Sight,
        look_s: float = LOOK_S,
    ) -> None:
        self._num_gpus = num_gpus
        self._life = life
        self._jobs = jobs
        self._tell = tell
        self._sight = sight
        self._look_s = look_s
        self._needs_driver = has_gpus
        self._inventory = GpuInventory(num_gpus=num_gpus if has_gpus else 0)
        self._watch = GpuWatch()
        self._board = NoticeBoard()
        self._injections = GpuInjections()
        self._newest: dict[int, GpuReading] = {}
        self._noted = ""

    def inject(self, kind: Injected, gpu: int) -> None:
        """Have GPU `gpu` show a fault from the next look on; raises AgentError if the node has no such GPU."""
        if not 0 <= gpu < self._num_gpus:
            raise AgentError(f"there is no GPU {gpu} on this node, it offers {self._num_gpus}: count from 0")
        self._injections.add(kind, gpu)

    def hang(self, seconds: float) -> None:
        """For a drill: from the next look on, and for so long, the driver does not answer."""
        self._sight.hang(seconds)

    def is_idle(self, gpu: int, since: float) -> bool:
        """Whether GPU `gpu` was seen without work after `since` (monotonic), or the node has none that could work.

        What nobody has seen, or a part of a GPU does, which nobody sees, is not known to be idle.
        """
        if not self._needs_driver:
            return True
        seen = self._newest.get(gpu)
        return seen is not None and seen.seen_at >= since and seen.utilization_ratio == 0.0 and not seen.mig

    async def run(self) -> None:
        """Look until cancelled; nothing that a driver does ends it."""
        try:
            while True:
                try:
                    self._take(await self._sight.look())
                except Exception as error:  # noqa: BLE001 - an agent must outlive its probes
                    self._note(logging.WARNING, f"a look at the GPUs failed ({error!r}): another one follows", error)
                await asyncio.sleep(self._look_s)
        finally:
            await self._sight.close()

    def _take(self, view: tuple[GpuReading, ...] | Blindness) -> None:
        """Conclude what can be concluded from one look."""
        life = self._life()
        missing: tuple[GpuFinding, ...] = ()
        readings: tuple[GpuReading, ...] = ()
        if not isinstance(view, Blindness):
            readings = view[: self._num_gpus]
            self._newest = {gpu.index: gpu for gpu in readings}
            missing = self._inventory.missing(readings, life=life)
        for seen in self._injections.looks(readings):
            for found in self._watch.news(seen, life=life, now=time.monotonic(), missing=missing):
                self._tell_fault(found)
        for notice in self._board.news((*self._signs_of(view), *signs(readings)), life=life):
            log.log(logging.WARNING if notice.active else logging.INFO, "%s: %s", notice.code, notice.text)
            self._tell(NodeNotice(code=notice.code, text=notice.text, active=notice.active))
        self._note_errors(view, readings)

    def _tell_fault(self, found: GpuFinding) -> None:
        log.warning("%s", found.evidence)
        self._tell(GpuFault(kind=found.kind, gpu=found.gpu, uuid=found.uuid, evidence=found.evidence, jobs=self._jobs()))

    def _signs_of(self, view: tuple[GpuReading, ...] | Blindness) -> Iterator[Sign]:
        """How the probe itself fares. A node that has never had a driver does not miss one."""
        match view:
            case Blindness(why="hung", reason=reason):
                yield Sign(code="gpu_probe_hung", who=WHO, what="hangs", detail=reason)
            case Blindness(why="no_driver") if not self._needs_driver:
                yield Sign(code="gpu_probe_hung", who=WHO)
            case Blindness(reason=reason):
                yield Sign(code="gpu_blind", who=WHO, what="cannot see", detail=reason)
            case _:
                self._needs_driver = True
                yield Sign(code="gpu_probe_hung", who=WHO)
                yield Sign(code="gpu_blind", who=WHO)

    def _note_errors(self, view: tuple[GpuReading, ...] | Blindness, readings: tuple[GpuReading, ...]) -> None:
        if isinstance(view, Blindness):
            if view.why == "no_driver":
                self._note(logging.INFO, f"GPU health is not watched on this node: {view.reason}")
            return
        failing = ", ".join(f"GPU {gpu.index} answers with NVML error {gpu.error_code}" for gpu in readings if gpu.error_code)
        if failing:
            self._note(logging.WARNING, failing)
        elif self._noted:
            self._note(logging.INFO, "every GPU answers")

    def _note(self, level: int, text: str, error: Exception | None = None) -> None:
        """Log how the probe fares, whenever that changes."""
        if text != self._noted:
            self._noted = text
            log.log(level, "%s", text, exc_info=error)
