"""Faults that GPUs are made to show, for drills: an overlay on what the driver tells, which works without a driver, too.

Pure. A fault that was injected stays as long as the agent lives, as a real one does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from unicron_lib.detection.gpu import GpuReading

Injected = Literal["ecc", "nvlink", "row-remap", "gpu-lost"]
LINK = 0
"""The NVLink that goes down; a GPU without NVLink is given it first."""

LOST_CODE = 15
"""NVML's GPU_IS_LOST."""


class GpuInjections:
    """What was injected so far."""

    def __init__(self) -> None:
        self._new: set[tuple[Injected, int]] = set()
        self._shown: set[tuple[Injected, int]] = set()

    def add(self, kind: Injected, gpu: int) -> None:
        """From the next look on, GPU `gpu` shows a fault of that kind."""
        self._new.add((kind, gpu))

    def looks(self, readings: Sequence[GpuReading]) -> tuple[tuple[GpuReading, ...], ...]:
        """What is to be seen instead of `readings`, one look after the other.

        A new fault comes with the look before it, in which the GPU is fine: only what rises or goes down is a fault.
        """
        before = _over(readings, {(gpu, BEFORE[kind]) for kind, gpu in self._new})
        is_new = bool(self._new)
        self._shown |= self._new
        self._new = set()
        now = _over(readings, {(gpu, AFTER[kind]) for kind, gpu in self._shown})
        return (before, now) if is_new else (now,)


Change = Callable[[GpuReading], GpuReading]


def _over(readings: Sequence[GpuReading], changes: set[tuple[int, Change]]) -> tuple[GpuReading, ...]:
    """The readings with these changes, by the index of the GPU; one that nobody has read is made up."""
    gpus = {gpu.index: gpu for gpu in readings}
    for index, change in changes:
        gpus[index] = change(gpus.get(index) or GpuReading(index=index, name="made up for a drill"))
    return tuple(gpus[index] for index in sorted(gpus))


def _before_ecc(gpu: GpuReading) -> GpuReading:
    return replace(gpu, ecc_uncorrected_volatile=gpu.ecc_uncorrected_volatile or 0)


def _ecc(gpu: GpuReading) -> GpuReading:
    return replace(gpu, ecc_uncorrected_volatile=(gpu.ecc_uncorrected_volatile or 0) + 1)


def _before_nvlink(gpu: GpuReading) -> GpuReading:
    return replace(gpu, nvlinks_up=tuple(sorted({LINK, *(gpu.nvlinks_up or ())})))


def _nvlink(gpu: GpuReading) -> GpuReading:
    return replace(gpu, nvlinks_up=tuple(link for link in gpu.nvlinks_up or () if link != LINK))


def _row_remap(gpu: GpuReading) -> GpuReading:
    return replace(gpu, row_remap_failure=True)


def _unchanged(gpu: GpuReading) -> GpuReading:
    return gpu


def _lost(gpu: GpuReading) -> GpuReading:
    return GpuReading(index=gpu.index, seen_at=gpu.seen_at, uuid=gpu.uuid, name=gpu.name, lost=True, error_code=LOST_CODE)


BEFORE: MappingProxyType[Injected, Change] = MappingProxyType(
    {"ecc": _before_ecc, "nvlink": _before_nvlink, "row-remap": _unchanged, "gpu-lost": _unchanged}
)
AFTER: MappingProxyType[Injected, Change] = MappingProxyType(
    {"ecc": _ecc, "nvlink": _nvlink, "row-remap": _row_remap, "gpu-lost": _lost}
)
