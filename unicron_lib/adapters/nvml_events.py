"""Xid events as the driver pushes them: at the moment of the event, instead of at the next look."""

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

WAIT_MS = 1000
PAUSE_S = 1.0
"""Between waits that fail: as long as a GPU is lost, each fails at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """The driver reported Xid `xid` for a GPU; 999 stands for one that NVML has no number for. `uuid` is empty if unknown."""

    gpu: int
    uuid: str
    xid: int


class XidEvents:
    """The event set of all GPUs that have Xid events. `off` says why, if none has."""

    def __init__(self) -> None:
        self._gpus: dict[int | None, tuple[int, str]] = {}
        self.off: tuple[str, ...] = ()
        try:
            self._set = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                self._register(index)
        except pynvml.NVMLError as error:
            self.off = (f"Xid events do not come from NVML (error {error.value}, {error}): the kernel's log tells them",)

    def _register(self, index: int) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            self._gpus[_address(handle)] = (index, str(pynvml.nvmlDeviceGetUUID(handle)))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise  # as each will answer
            # a lost GPU has nothing more to tell; the others have

    def __iter__(self) -> Iterator[XidEvent]:
        """Every event, for ever; ends at once if no GPU has any."""
        while self._gpus:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, WAIT_MS)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    time.sleep(PAUSE_S)
                continue
            known = self._gpus.get(_address(event.device))
            if known and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                yield XidEvent(gpu=known[0], uuid=known[1], xid=int(event.eventData))


def _address(handle: Any) -> int | None:
    """NVML's handle of a GPU is a pointer that stays the same."""
    return ctypes.cast(handle, ctypes.c_void_p).value
