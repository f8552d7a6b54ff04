"""What NVIDIA's driver says about the GPUs of this node.

Every GPU is read by itself: a lost one never hides the others. A metric that the GPU or the driver lacks is None, which
is not the same as 0.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pynvml

from unicron_lib.adapters.nvml_metrics import Metric, metrics_of
from unicron_lib.detection.gpu import DRIVER_ERRORS, GpuReading

ABSENT = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,  # so a GPU that is split by MIG answers for its memory
    }
)
"""Codes that mean: this GPU, or this version of the driver, has no such metric for us."""

LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND})
NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlAbsent:
    """NVML tells nothing: the false one of the answers. `reason` is a sentence, `code` NVML's error.

    With `no_driver`, none is installed or loaded, as on a node without GPUs.
    """

    reason: str
    code: int

    def __bool__(self) -> Literal[False]:
        return False

    @property
    def no_driver(self) -> bool:
        """There is nobody who could tell; otherwise there is, and something is wrong."""
        return self.code in NO_DRIVER


def open_nvml() -> "Nvml | NvmlAbsent":
    """Load the driver's library; a machine without one, or without a loaded driver, is an answer and no error."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlAbsent(reason=_why_absent(error.value), code=error.value)
    return Nvml()


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
    """The driver's library, opened until the process ends: a driver may hang when it is let go of, too.

    `driver` is its version, None if it does not tell; `off` are the checks it lacks.
    """

    def __init__(self) -> None:
        self.driver = _driver_version()
        self._metrics, self.off = metrics_of(self.driver)
        self._gpus: dict[int, _Gpu] = {}

    def read(self) -> tuple[GpuReading, ...] | NvmlAbsent:
        """Look at every GPU, in the order of their indices. Never raises for what the driver answers.

        That none of them can be read says nothing about them, but that the driver cannot be asked from here.
        """
        try:
            num_gpus = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return NvmlAbsent(reason=f"the driver does not count its GPUs ({_explain(error.value)})", code=error.value)
        gpus = tuple(self._gpus.setdefault(index, _Gpu(index=index)).read(self._metrics) for index in range(num_gpus))
        if not gpus:
            return NvmlAbsent(reason="the driver shows no GPU", code=pynvml.NVML_ERROR_NOT_FOUND)
        if all(gpu.is_blind for gpu in gpus):
            code = gpus[0].error_code or pynvml.NVML_ERROR_UNKNOWN
            return NvmlAbsent(reason=f"none of the {num_gpus} GPUs can be read ({_explain(code)})", code=code)
        return gpus


def _driver_version() -> str | None:
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


@dataclass(slots=True, kw_only=True)
class _Gpu:
    """A GPU and what was last known of its identity, which a lost one no longer tells."""

    index: int
    identity: dict[str, Any] = field(default_factory=dict)

    def read(self, metrics: tuple[Metric, ...]) -> GpuReading:
        told: dict[str, Any] = {"seen_at": time.monotonic()}
        errors: list[int] = []
        try:
            # asked for anew each time: the handle is the first thing that a lost GPU refuses
            handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
            for metric in (*IDENTITY, *metrics):
                told |= _ask(metric, handle, errors)
        except pynvml.NVMLError as error:
            code = error.value
            return GpuReading(index=self.index, seen_at=told["seen_at"], **self.identity, lost=code in LOST, error_code=code)
        self.identity |= {key: told.pop(key) for key in ("uuid", "name") if key in told}
        return GpuReading(index=self.index, **self.identity, **told, error_code=next(iter(errors), None))


def _ask(metric: Metric, handle: Any, errors: list[int]) -> dict[str, Any]:
    """What `metric` answers; nothing, and a note in `errors`, if it fails on a GPU that can be used."""
    try:
        return metric(handle)
    except pynvml.NVMLError as error:
        if error.value in LOST or error.value in DRIVER_ERRORS:
            raise
        if error.value not in ABSENT:
            errors.append(error.value)
        return {}


def _uuid(handle: Any) -> dict[str, Any]:
    return {"uuid": pynvml.nvmlDeviceGetUUID(handle)}


def _name(handle: Any) -> dict[str, Any]:
    return {"name": pynvml.nvmlDeviceGetName(handle)}


IDENTITY: tuple[Metric, ...] = (_uuid, _name)
