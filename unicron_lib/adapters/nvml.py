"""What NVIDIA's driver says about the GPUs of this node.

Every GPU is read by itself: a lost one never hides the others. A metric that the GPU or the driver lacks is None, which
is not the same as 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import pynvml

from unicron_lib.detection.gpu import GpuReading

THROTTLE_REASONS = MappingProxyType(
    {
        pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal_slowdown",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    }
)
"""Bits of NVML's clock event reasons that slow a busy GPU down; idleness and chosen clocks are left out."""

ABSENT = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Codes that mean: this GPU, or this version of the driver, has no such metric."""

Metric = Callable[[Any], dict[str, Any]]
"""One query of a GPU by its handle; it answers a part of a `GpuReading` by its field names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlAbsent:
    """There is no NVML here: the false one of `open_nvml`'s answers. `reason` is a sentence, `code` NVML's error."""

    reason: str
    code: int

    def __bool__(self) -> Literal[False]:
        return False


def open_nvml() -> "Nvml | NvmlAbsent":
    """Load the driver's library; a machine without one, or without a loaded driver, is an answer and no error."""
    try:
        pynvml.nvmlInit()
        return Nvml(num_gpus=pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        return NvmlAbsent(reason=_why_absent(error.value), code=error.value)


def _why_absent(code: int) -> str:
    match code:
        case pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return "no NVIDIA driver is installed (libnvidia-ml.so.1 was not found)"
        case pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return "the NVIDIA driver is installed but not loaded, load it or see the kernel's log"
        case _:
            return f"NVML does not start ({_explain(code)})"


def _explain(code: int) -> str:
    return f"error {code}, {pynvml.NVMLError(code)}"


class Nvml:
    """The driver's library, opened. The GPUs are those that the driver had when it was opened."""

    def __init__(self, *, num_gpus: int) -> None:
        self._gpus = tuple(_Gpu(index=index) for index in range(num_gpus))

    def read(self) -> tuple[GpuReading, ...]:
        """Look at every GPU, in the order of their indices. Never raises for what a GPU answers."""
        return tuple(gpu.read() for gpu in self._gpus)

    def close(self) -> None:
        """Let go of the driver; errors of a driver that is already gone do not matter any more."""
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return


@dataclass(slots=True, kw_only=True)
class _Gpu:
    """A GPU and what was last known of its identity, which a lost one no longer tells."""

    index: int
    identity: dict[str, Any] = field(default_factory=dict)

    def read(self) -> GpuReading:
        metrics: dict[str, Any] = {}
        errors: list[int] = []
        try:
            # asked for anew each time: the handle is the first thing that a lost GPU refuses
            handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
            for metric in METRICS:
                metrics |= _ask(metric, handle, errors)
        except pynvml.NVMLError as error:
            lost = error.value == pynvml.NVML_ERROR_GPU_IS_LOST
            return GpuReading(index=self.index, **self.identity, lost=lost, error_code=error.value)
        self.identity |= {key: metrics.pop(key) for key in ("uuid", "name") if key in metrics}
        return GpuReading(index=self.index, **self.identity, **metrics, error_code=next(iter(errors), None))


def _ask(metric: Metric, handle: Any, errors: list[int]) -> dict[str, Any]:
    """What `metric` answers; nothing, and a note in `errors`, if it fails on a GPU that is there."""
    try:
        return metric(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise
        if error.value not in ABSENT:
            errors.append(error.value)
        return {}


def _uuid(handle: Any) -> dict[str, Any]:
    return {"uuid": pynvml.nvmlDeviceGetUUID(handle)}


def _name(handle: Any) -> dict[str, Any]:
    return {"name": pynvml.nvmlDeviceGetName(handle)}


def _temperature(handle: Any) -> dict[str, Any]:
    return {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _power(handle: Any) -> dict[str, Any]:
    return {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _utilization(handle: Any) -> dict[str, Any]:
    return {"utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}


def _memory(handle: Any) -> dict[str, Any]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _ecc(handle: Any) -> dict[str, Any]:
    kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrected_volatile": pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)}


def _row_remapping(handle: Any) -> dict[str, Any]:
    _, _, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"row_remap_pending": bool(pending), "row_remap_failure": bool(failure)}


def _throttling(handle: Any) -> dict[str, Any]:
    bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return {"throttle_reasons": tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)}


METRICS: tuple[Metric, ...] = (
    _uuid,
    _name,
    _temperature,
    _power,
    _utilization,
    _memory,
    _ecc,
    _row_remapping,
    _throttling,
)
"""All that is asked."""
