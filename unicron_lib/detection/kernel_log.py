"""What one line of the kernel's log says of hardware. Pure; takes any bytes, whoever wrote them.

It does not matter what stands before the kernel's words: the prefix of /dev/kmsg, times as dmesg or journald write them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from unicron_lib.detection.gpu import GpuFaultKind
from unicron_lib.detection.gpu_names import pci_address

LINE_LIMIT_BYTES = 2048
"""What is looked at of one line; the kernel's own have 1 KiB at most."""
TEXT_LIMIT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class XidLine:
    """The driver reports Xid `code`; `pci` is empty if it does not say of which GPU. `stamp` is what stood before."""

    pci: str
    code: int
    text: str = ""
    pid: int | None = None
    stamp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLine:
    """The driver names a GPU: the lines after it are about it. `uuid` may be empty."""

    pci: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLine:
    """A network port lost or found its link."""

    port: str
    up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OomLine:
    """The kernel killed process `pid` for memory: the node's, or that of a `cgroup` only."""

    pid: int
    name: str
    cgroup: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageLine:
    """Hardware other than by an Xid: a fault of `kind`, or where that is None a notice `code`. `device` says of what."""

    device: str
    text: str
    kind: GpuFaultKind | None = None
    code: str = ""


Said = XidLine | GpuLine | LinkLine | OomLine | DamageLine

_XID = re.compile(
    r"NVRM:\s*Xid \((?P<where>[^)]{1,64})\): (?P<code>\d{1,9})\b"
    r"(?:, pid=(?P<pid>[^,]{0,32}))?(?:, name=[^,]{0,64})?(?:,\s*(?P<text>.*))?"
)
_SXID = re.compile(r"SXid \((?P<where>[^)]{1,64})\): (?P<code>\d{1,9}), (?P<text>.*)")
_GPU = re.compile(
    r"NVRM: (?:GPU at (?:PCI:)?|The NVIDIA GPU )(?P<where>[0-9a-fA-F:.]{7,24})(?::? (?P<uuid>GPU-[0-9a-fA-F-]{8,64}))?"
)
_OFF_THE_BUS = re.compile(r"NVRM: (?:GPU (?:at )?(?:PCI:)?(?P<where>[0-9a-fA-F:.]{7,24}):? .*|.*)fallen off the bus")
_DMA = re.compile(r"NVRM: (?P<text>.*DMA mapping.*)")
_MEMORY = re.compile(
    r"(?P<text>EDAC (?P<device>\S+?): \d+ UE .*"
    r"|[Uu]ncorrected hardware memory error.*"
    r"|Memory failure: \S+ .*hardware memory corruption.*)"
)
_DISK = re.compile(
    r"(?P<text>EXT4-fs error \(device (?P<ext>\S{1,64})\).*"
    r"|XFS \((?P<xfs>\S{1,64})\): .*(?:I/O [Ee]rror|[Cc]orruption|[Ss]hutting down).*"
    r"|(?:I/O|medium) error, dev (?P<dev>[\w-]{1,64}),.*"
    r"|Buffer I/O error on (?:dev|device) (?P<buffer>[\w-]{1,64}),.*"
    r"|nvme (?P<nvme>nvme\d+): (?:I/O .*timeout|controller is down|Removing after probe failure).*)"
)
_OOM = re.compile(
    r"(?P<scope>Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (?P<pid>\d{1,10}) \((?P<name>[^)]{0,64})\)"
)
_PORT = re.compile(r"(?P<device>[\w.-]{1,64}): Port: (?P<number>\d{1,3}) Link (?P<state>DOWN|ACTIVE)\b")
_BOND = re.compile(r"\(slave (?P<port>[\w.-]{1,64})\): link status definitely (?P<state>down|up)\b")
_CARRIER = re.compile(
    r"(?:^|[\s;])[a-z][\w-]{0,31} [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d (?P<port>[\w.-]{1,64}): (?:\w+: )?(?:[\w.-]+ )?"
    r"(?:NIC )?[Ll]ink (?:is )?(?P<state>[Dd]own|[Uu]p)\b"
)
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\ufffc]+")


def parse(line: bytes | str) -> Said | None:
    """What a line says, None for the many that are about something else; never raises."""
    raw = line if isinstance(line, bytes) else line.encode(errors="replace")
    text = raw[:LINE_LIMIT_BYTES].decode(errors="replace")
    for words, read in _READERS:
        if words in text:
            clean = _UNPRINTABLE.sub(" ", text.replace("\\x0a", " ")).strip()
            if said := read(clean):
                return said
    return None


def _xid(line: str) -> Said | None:
    found = _XID.search(line)
    if not found:
        return None
    pid = re.sub(r"\D", "", found["pid"] or "")
    return XidLine(
        pci=pci_address(found["where"]),
        code=int(found["code"]),
        text=(found["text"] or "")[:TEXT_LIMIT],
        pid=int(pid) if pid else None,
        stamp=line[: found.start()].strip(),
    )


def _off_the_bus(line: str) -> Said | None:
    """Some drivers lose a GPU without an Xid: it is one all the same."""
    found = _OFF_THE_BUS.search(line)
    text = "GPU has fallen off the bus"
    return (
        XidLine(pci=pci_address(found["where"] or ""), code=79, text=text, stamp=line[: found.start()].strip())
        if found
        else None
    )


def _switch(line: str) -> Said | None:
    found = _SXID.search(line)
    if not found or found["text"].startswith("Data "):
        return None
    switch = f"the NVSwitch at {pci_address(found['where'])}"
    text = f"{switch} reports SXid {int(found['code'])}: {found['text'][:TEXT_LIMIT]}"
    device = f"{switch}/{found['code']}"
    if found["text"].startswith("Fatal"):
        return DamageLine(device=device, text=text, kind="nvlink_error")
    return DamageLine(device=device, text=text, code="xid")


def _gpu(line: str) -> Said | None:
    found = _GPU.search(line)
    return GpuLine(pci=pci_address(found["where"]), uuid=found["uuid"] or "") if found else None


def _dma(line: str) -> Said | None:
    found = _DMA.search(line)
    text = found["text"][:TEXT_LIMIT] if found else ""
    return DamageLine(device=pci_address(text), text=text, kind="invalid_dma_mapping") if found else None


def _memory(line: str) -> Said | None:
    found = _MEMORY.search(line)
    return DamageLine(device=found["device"] or "memory", text=found["text"][:TEXT_LIMIT], kind="ecc_error") if found else None


def _disk(line: str) -> Said | None:
    found = _DISK.search(line)
    if not found:
        return None
    device = next(filter(None, found.groups()[1:]), "disk")
    return DamageLine(device=device, text=found["text"][:TEXT_LIMIT], code="disk_error")


def _oom(line: str) -> Said | None:
    found = _OOM.search(line)
    return OomLine(pid=int(found["pid"]), name=found["name"], cgroup=found["scope"] != "Out of memory") if found else None


def _link(line: str) -> Said | None:
    if found := _PORT.search(line):
        return LinkLine(port=f"{found['device']}/{found['number']}", up=found["state"] == "ACTIVE")
    found = _BOND.search(line) or _CARRIER.search(line)
    return LinkLine(port=found["port"], up=found["state"].lower() == "up") if found else None


_READERS: tuple[tuple[str, Callable[[str], Said | None]], ...] = (
    ("Xid (", _xid),
    ("SXid (", _switch),
    ("fallen off the bus", _off_the_bus),
    ("NVRM: GPU at", _gpu),
    ("NVRM: The NVIDIA GPU", _gpu),
    ("DMA mapping", _dma),
    ("Killed process", _oom),
    ("Kill process", _oom),
    ("ink ", _link),
    ("EDAC", _memory),
    ("ardware memory", _memory),
    ("EXT4-fs error", _disk),
    ("XFS (", _disk),
    (" error", _disk),
    ("nvme nvme", _disk),
)
"""The first whose words are in a line and that understands it wins: most lines cost a few searches for plain text."""
