"""When is a GPU broken? Pure: what the driver says of it in, findings with their evidence out.

NVIDIA names what is counted and which errors there are; what of it is a fault, and every threshold here, is ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MappingProxyType
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

DRIVER_ERRORS = MappingProxyType({11: "its interrupts do not arrive", 16: "it must be reset before it can be used again"})
"""NVML errors (IRQ_ISSUE, RESET_REQUIRED) that make a GPU useless, whatever was asked."""

NVLINK_LIMITS_PER_S = MappingProxyType({"nvlink_crc_errors": 100.0, "nvlink_replays": 100.0, "nvlink_recoveries": 0.5})
"""Errors a second, over all links of a GPU and from one look to the next, from which its links are broken.

Ours, none is NVIDIA's: a link repairs single errors by sending again, so that a few cost nothing. A recovery trains the
link anew, which stops it for a moment: three of them in the 5 s between two looks are too many.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One look at one GPU; a metric that the GPU or its driver lacks is None.

    A `lost` GPU ("has fallen off the bus") has no metrics, but the `uuid` and `name` that were last known.
    `error_code` is the first NVML error other than "there is no such metric" that a query met, None if there was none.
    `seen_at` is in seconds of the node's monotonic clock. Uncorrected ECC errors are counted since the driver was loaded
    (volatile) and over the GPU's life (aggregate), NVLink errors over all its links. `nvlinks_up` are the numbers of the
    links that are up, None without NVLink. `recovery_action` is the number of what the driver asks for, 0 for nothing.
    With `mig`, the GPU is split, and its parts are not looked at.
    """

    index: int
    seen_at: float = 0.0
    uuid: str | None = None
    name: str | None = None
    temperature_c: int | None = None
    temperature_limit_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    mig: bool | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failure: bool | None = None
    throttle_reasons: tuple[str, ...] | None = None
    recovery_action: int | None = None
    nvlinks_up: tuple[int, ...] | None = None
    nvlink_crc_errors: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    lost: bool = False
    error_code: int | None = None

    @property
    def is_blind(self) -> bool:
        """The GPU told an error and nothing else: it is not known how it is."""
        told_nothing = all(getattr(self, metric) is None for metric in _METRICS)
        return told_nothing and not self.lost and self.error_code is not None and self.error_code not in DRIVER_ERRORS

    @property
    def label(self) -> str:
        """What people call the GPU: its index, name and UUID, as far as they are known."""
        who = ", ".join(part for part in (self.name, self.uuid) if part) or "its UUID was never told"
        return f"GPU {self.index} ({who})"


_NO_METRICS = frozenset({"index", "seen_at", "uuid", "name", "lost", "error_code"})
_METRICS = tuple(field.name for field in fields(GpuReading) if field.name not in _NO_METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    """A GPU that no job should be trained on; `uuid` is empty if it was never told."""

    kind: GpuFaultKind
    gpu: int
    uuid: str
    evidence: str


def judge(before: GpuReading | None, now: GpuReading) -> tuple[GpuFinding, ...]:
    """All that is wrong with a GPU now, the gravest first; `before` is what is known of the same one from earlier looks.

    Errors that were counted before the first look are history: only a count that has risen is a fault. So is only a link
    that was up. What could not be read is no evidence, in either direction.
    """
    found = ((kind, what(before or now, now)) for kind, what in RULES)
    return tuple(finding(kind, now, text) for kind, text in found if text)


def finding(kind: GpuFaultKind, gpu: GpuReading, what: str) -> GpuFinding:
    """`gpu` is broken: `what` ends the sentence that begins with its name."""
    return GpuFinding(kind=kind, gpu=gpu.index, uuid=gpu.uuid or "", evidence=f"{gpu.label} {what}")


def _lost(_: GpuReading, now: GpuReading) -> str:
    return f"is lost, it no longer answers the driver (NVML error {now.error_code})" if now.lost else ""


def _unusable(_: GpuReading, now: GpuReading) -> str:
    why = DRIVER_ERRORS.get(now.error_code or 0)
    return f"cannot be used: {why} (NVML error {now.error_code})" if why else ""


def _not_remapped(_: GpuReading, now: GpuReading) -> str:
    return "could not remap a broken row of its memory: it is due for replacement" if now.row_remap_failure else ""


def _ecc_errors(before: GpuReading, now: GpuReading) -> str:
    for metric, since in _ECC_COUNTS.items():
        known, counted = getattr(before, metric), getattr(now, metric)
        if known is not None and counted is not None and counted > known:
            return f"counts {counted} uncorrected ECC errors {since}, {known} before"
    return ""


_ECC_COUNTS = MappingProxyType(
    {"ecc_uncorrected_volatile": "since its driver was loaded", "ecc_uncorrected_aggregate": "in its life"}
)


def _links_down(before: GpuReading, now: GpuReading) -> str:
    if before.nvlinks_up is None or now.nvlinks_up is None:
        return ""
    down = ", ".join(str(link) for link in sorted({*before.nvlinks_up} - {*now.nvlinks_up}))
    return f"lost its NVLink {down}, which was up before" if down else ""


def _link_errors(before: GpuReading, now: GpuReading) -> str:
    passed_s = now.seen_at - before.seen_at
    for metric, limit in NVLINK_LIMITS_PER_S.items():
        known, counted = getattr(before, metric), getattr(now, metric)
        if known is not None and counted is not None and counted - known >= limit * passed_s > 0:
            what = metric.replace("_", " ").replace("nvlink", "NVLink")
            return f"counts {counted - known} {what} within {passed_s:.1f} s, {limit:g} a second are too many"
    return ""


Rule = Callable[[GpuReading, GpuReading], str]
"""What is wrong with a GPU, as the end of a sentence; empty if nothing is, or nobody can tell."""

RULES: tuple[tuple[GpuFaultKind, Rule], ...] = (
    ("gpu_lost", _lost),
    ("gpu_driver_error", _unusable),
    ("ecc_error", _not_remapped),
    ("ecc_error", _ecc_errors),
    ("nvlink_error", _links_down),
    ("nvlink_error", _link_errors),
)
"""All that makes a GPU count as broken, the gravest first."""
