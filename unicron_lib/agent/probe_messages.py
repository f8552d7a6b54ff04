"""The words of the probe process: one JSON object a line on its standard output. The agent asks for a look by a line."""

from dataclasses import dataclass
from typing import Literal

from unicron_lib.detection.gpu import GpuReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The process runs and is about to call the driver for the first time."""

    type: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The driver has answered. `driver` is its version; `off` says which checks it lacks and why, a sentence each."""

    driver: str | None
    off: tuple[str, ...]
    type: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The last word: the driver cannot be asked. With `no_driver` there is none, otherwise something is wrong with it."""

    reason: str
    no_driver: bool
    type: Literal["closed"] = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The answer to a line: every GPU, in the order of the indices, lost ones included."""

    gpus: tuple[GpuReading, ...]
    type: Literal["look"] = "look"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """The driver has reported an Xid, this moment; `uuid` of the GPU is empty if unknown."""

    gpu: int
    uuid: str
    xid: int
    type: Literal["xid_seen"] = "xid_seen"


FromProbe = Started | Opened | Closed | Look | XidSeen
