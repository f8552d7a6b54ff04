"""From what the kernel says to what is told of a node's hardware: one memory for all witnesses. Pure: time is an argument."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from unicron_lib.detection.findings import Finding, HardwareFault, HardwareNotice
from unicron_lib.detection.gpu_names import GpuName, GpuNames
from unicron_lib.detection.kernel_log import DamageLine, GpuLine, LinkLine, OomLine, Said, XidLine
from unicron_lib.detection.link import LinkWatch
from unicron_lib.detection.xid import XidWatch

MAX_DAMAGES = 256
MAX_NAMED = 8
"""Other notices that one names."""


class KernelWatch:
    """What the kernel's log and the driver's events tell together; `now` is any clock that never goes back, in seconds.

    GPUs from index `num_gpus` on are not offered to jobs: what happens to them is ignored.
    """

    def __init__(self, *, num_gpus: int, xids: XidWatch | None = None, links: LinkWatch | None = None) -> None:
        self.names = GpuNames()
        self._num_gpus = num_gpus
        self._xids = xids or XidWatch()
        self._links = links or LinkWatch()
        self._damages: dict[tuple[str, str], float] = {}
        self._named = ""
        self._noted: dict[str, list[str]] = {}

    def learn(self, names: Iterable[GpuName]) -> None:
        """Take in which names belong to one GPU."""
        for name in names:
            self.names.learn(name)

    def hear(self, said: Said, now: float) -> Iterator[Finding]:
        """Take in a line."""
        match said:
            case XidLine():
                gpu = GpuName(pci=said.pci or self._named)
                yield from self.hear_xid(gpu, said.code, now, text=said.text, stamp=said.stamp)
            case GpuLine():
                self._named = said.pci
                if said.uuid:
                    self.names.learn(GpuName(pci=said.pci, uuid=said.uuid))
            case LinkLine():
                yield from self._links.hear(said.port, now, up=said.up)
            case DamageLine():
                yield from self._damage(said, now)
            case OomLine():
                pass  # the end of the process tells of it

    def hear_xid(self, gpu: GpuName, code: int, now: float, *, text: str = "", stamp: str = "") -> Iterator[Finding]:
        """Take in an Xid, whoever tells of it."""
        whole = self.names.complete(gpu)
        if whole.index is None or whole.index < self._num_gpus:
            yield from self._told(self._xids.hear(whole, code, now, text=text, stamp=stamp), now)

    def due(self, now: float) -> Iterator[Finding]:
        """What only time brings about; to be asked a few times a second."""
        yield from self._told(self._xids.due(now), now)
        yield from self._links.due(now)
        for code in [code for code in self._noted if not self._holding(code, now)]:
            del self._noted[code]
            yield HardwareNotice(code=code, text=f"nothing more of it for {self._xids.rules.window_s:g} s", active=False)

    def _damage(self, said: DamageLine, now: float) -> Iterator[Finding]:
        """Tell it once, until it was silent for the window of Xids."""
        key = (said.kind or said.code, said.device)
        before = self._damages.pop(key, float("-inf"))
        self._damages[key] = now  # the newest is last
        if len(self._damages) > MAX_DAMAGES:
            self._damages.pop(next(iter(self._damages)))
        if now - before < self._xids.rules.window_s:
            return
        if said.kind is None:
            yield from self._told([HardwareNotice(code=said.code, text=said.text)], now)
        else:
            gpu = self.names.complete(GpuName(pci=said.device))
            yield HardwareFault(kind=said.kind, evidence=said.text, gpu=gpu.index, uuid=gpu.uuid)

    def _told(self, findings: Iterable[Finding], now: float) -> Iterator[Finding]:
        """A node has one note a code: a notice names the others that hold, too."""
        for found in findings:
            if not isinstance(found, HardwareNotice):
                yield found
                continue
            holding = self._holding(found.code, now)
            others = [what for what in self._noted.get(found.code, ()) if what in holding]
            self._noted[found.code] = holding
            yield replace(found, text=f"{found.text}; besides {', '.join(others[:MAX_NAMED])}") if others else found

    def _holding(self, code: str, now: float) -> list[str]:
        """The notices of a code that were told and not silent since for the window of Xids."""
        window_s = self._xids.rules.window_s
        damages = [device for (what, device), at in self._damages.items() if what == code and now - at < window_s]
        return [*damages, *(self._xids.noted(now) if code == "xid" else ())]
