"""What the kernel's log and the driver's events tell: faults of hardware, and notices for people."""

from dataclasses import dataclass

from unicron_lib.detection.gpu import GpuFaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFault:
    """Hardware is broken, or shows that something else is (`symptom`).

    `gpu` is None and `uuid` empty where nobody can tell which GPU it is, `xid` is None without an Xid. `count` is how often it
    was seen.
    """

    kind: GpuFaultKind
    evidence: str
    gpu: int | None = None
    uuid: str = ""
    xid: int | None = None
    count: int = 1
    symptom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareNotice:
    """Something that people should know and that is no failure; with `active` False it is over."""

    code: str
    text: str
    active: bool = True


Finding = HardwareFault | HardwareNotice
