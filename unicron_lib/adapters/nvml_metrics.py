"""All that the driver is asked about a GPU: a function a metric, each answers a part of a `GpuReading` by its field names.

A metric that is not supported is left out, or raises NVML's error for it, which the caller knows.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import pynvml

Metric = Callable[[Any], dict[str, Any]]
"""One query of a GPU by its handle."""

FieldId = int | tuple[int, int]
"""Number of an NVML field, where it needs one with that of the link."""

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

NVLINK_COUNTS: MappingProxyType[str, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "nvlink_crc_errors": (
            (pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
            (pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,),
        ),
        "nvlink_replays": ((pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,), ()),
        "nvlink_recoveries": (
            (pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,),
            (pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,),
        ),
    }
)
"""The fields that make each count: totals of the GPU, up to NVLink 4, and those of a single link, from NVLink 5 on."""

RECOVERY_ACTION_DRIVER = 570
"""The first driver whose recovery action can be relied on."""

_VALUE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where the value of a field is, by NVML's value type."""


def field_values(handle: Any, field_ids: Sequence[FieldId]) -> list[Any]:
    """The values of NVML fields, None for those that the GPU does not have; raises NVMLError for a lost GPU."""
    values = pynvml.nvmlDeviceGetFieldValues(handle, list(field_ids))
    for value in values:
        if value.nvmlReturn == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise pynvml.NVMLError(value.nvmlReturn)
    return [
        getattr(value.value, _VALUE[value.valueType]) if value.nvmlReturn == pynvml.NVML_SUCCESS else None for value in values
    ]


def _temperature(handle: Any) -> dict[str, Any]:
    return {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _temperature_limit(handle: Any) -> dict[str, Any]:
    return {"temperature_limit_c": pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX)}


def _power(handle: Any) -> dict[str, Any]:
    return {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _power_limit(handle: Any) -> dict[str, Any]:
    return {"power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}


def _utilization(handle: Any) -> dict[str, Any]:
    return {"utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}


def _memory(handle: Any) -> dict[str, Any]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _mig(handle: Any) -> dict[str, Any]:
    current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    return {"mig": bool(current)}


def _ecc_volatile(handle: Any) -> dict[str, Any]:
    return {"ecc_uncorrected_volatile": _uncorrected(handle, pynvml.NVML_VOLATILE_ECC)}


def _ecc_aggregate(handle: Any) -> dict[str, Any]:
    return {"ecc_uncorrected_aggregate": _uncorrected(handle, pynvml.NVML_AGGREGATE_ECC)}


def _uncorrected(handle: Any, counter: int) -> int:
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter))


def _row_remapping(handle: Any) -> dict[str, Any]:
    _, _, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"row_remap_pending": bool(pending), "row_remap_failure": bool(failure)}


def _throttling(handle: Any) -> dict[str, Any]:
    bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return {"throttle_reasons": tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)}


def _nvlinks(handle: Any) -> dict[str, Any]:
    states = {link: state for link in range(pynvml.NVML_NVLINK_MAX_LINKS) if (state := _link_state(handle, link)) is not None}
    return {"nvlinks_up": tuple(link for link, state in states.items() if state)} if states else {}


def _link_state(handle: Any, link: int) -> int | None:
    """1 if the link is up, 0 if it is down, None if the GPU has no such link."""
    try:
        return int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError as error:
        if error.value in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT}:
            return None
        raise


def _nvlink_errors(handle: Any) -> dict[str, Any]:
    links = _nvlinks(handle).get("nvlinks_up", ())
    if not links:
        return {}
    wanted: dict[str, list[FieldId]] = {
        name: [*totals, *((field, link) for field in of_links for link in links)]
        for name, (totals, of_links) in NVLINK_COUNTS.items()
    }
    values = iter(field_values(handle, [field for fields in wanted.values() for field in fields]))
    counted = {name: [next(values) for _ in fields] for name, fields in wanted.items()}
    known = {name: [value for value in values if value is not None] for name, values in counted.items()}
    return {name: sum(values) for name, values in known.items() if values}


def _recovery_action(handle: Any) -> dict[str, Any]:
    (action,) = field_values(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return {"recovery_action": action}


METRICS: tuple[Metric, ...] = (
    _temperature,
    _temperature_limit,
    _power,
    _power_limit,
    _utilization,
    _memory,
    _mig,
    _ecc_volatile,
    _ecc_aggregate,
    _row_remapping,
    _throttling,
    _nvlinks,
    _nvlink_errors,
)
"""What is asked of every driver."""


def metrics_of(driver: str | None) -> tuple[tuple[Metric, ...], tuple[str, ...]]:
    """What a driver of this version is asked, and why each check that it lacks is off, in a sentence each."""
    if not hasattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"):
        return METRICS, ("recovery actions are not watched: this version of nvidia-ml-py does not know them",)
    number = driver.partition(".")[0] if driver else ""
    if number.isdecimal() and int(number) < RECOVERY_ACTION_DRIVER:
        return METRICS, (f"recovery actions are not watched: driver {driver} is older than {RECOVERY_ACTION_DRIVER}",)
    return (*METRICS, _recovery_action), ()
