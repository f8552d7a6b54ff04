"""When is a GPU broken? Pure: what the driver says of it in, a finding with its evidence out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

GpuFaultKind = Literal[
    "ecc_error",
    "gpu_lost",
    "nvlink_error",
    "gpu_driver_error",
    "illegal_memory_access",
    "invalid_dma_mapping",
    "cuda_error",
    "link_flapping",
    "out_of_memory",
    "other",
]
"""The kinds of failure, spelled as in `ErrorKind`, that hardware, its driver or the kernel can tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One look at one GPU.

    A `lost` GPU ("has fallen off the bus") has no metrics, but the `uuid` and `name` that were last known.
    `error_code` is the first NVML error other than "not supported" that a query met, None if there was none.
    ECC errors are counted since the driver was loaded.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ecc_uncorrected_volatile: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failure: bool | None = None
    throttle_reasons: tuple[str, ...] | None = None
    lost: bool = False
    error_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    """A GPU that no job should be trained on; `uuid` is empty if it was never told."""

    kind: GpuFaultKind
    gpu: int
    uuid: str
    evidence: str


def judge(before: GpuReading | None, now: GpuReading) -> GpuFinding | None:
    """What is wrong with a GPU now, the gravest first; `before` is an earlier reading of the same one.

    Errors that were counted before the first look are history: only a count that has risen is a fault. What could not
    be read is no evidence, in either direction.
    """
    if now.lost:
        return _finding("gpu_lost", now, f"is lost, it no longer answers the driver (NVML error {now.error_code})")
    if now.row_remap_failure:
        return _finding("ecc_error", now, "could not remap a broken row of its memory: it is due for replacement")
    counted, known = now.ecc_uncorrected_volatile, before.ecc_uncorrected_volatile if before else None
    if counted is not None and known is not None and counted > known:
        return _finding(
            "ecc_error", now, f"counts {counted} uncorrected ECC errors since its driver was loaded, {known} before"
        )
    return None


def _finding(kind: GpuFaultKind, gpu: GpuReading, what: str) -> GpuFinding:
    uuid = gpu.uuid or ""
    who = ", ".join(part for part in (gpu.name, uuid) if part) or "its UUID was never told"
    return GpuFinding(kind=kind, gpu=gpu.index, uuid=uuid, evidence=f"GPU {gpu.index} ({who}) {what}")


class GpuWatch:
    """The memory of a watcher: what each GPU is compared with, and what has been told already."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str | None], GpuReading] = {}
        self._told: set[tuple[str, int, str]] = set()

    def news(self, readings: Iterable[GpuReading], *, life: str) -> tuple[GpuFinding, ...]:
        """The findings of this look that were not told yet, each once per GPU and kind in a `life` of the agent.

        A new life tells again what is still wrong: what the old one said went down with it.
        """
        found = []
        for now in readings:
            same = (now.index, now.uuid)  # a GPU that was replaced begins anew
            finding = judge(self._before.get(same), now)
            self._before[same] = _baseline(self._before.get(same), now)
            if finding and (life, now.index, finding.kind) not in self._told:
                self._told.add((life, now.index, finding.kind))
                found.append(finding)
        return tuple(found)


def _baseline(before: GpuReading | None, now: GpuReading) -> GpuReading:
    """What later looks are compared with: the lowest count seen, since a driver that is loaded anew counts from 0."""
    counts = [r.ecc_uncorrected_volatile for r in (before, now) if r and r.ecc_uncorrected_volatile is not None]
    return replace(now, ecc_uncorrected_volatile=min(counts, default=None))
