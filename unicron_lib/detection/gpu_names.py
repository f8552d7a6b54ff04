"""One GPU has three names: its index, its UUID, its address on the PCI bus. Each witness knows some of them."""

import re
from dataclasses import dataclass, field

MAX_GPUS = 256
"""Names that are kept; a log full of made-up addresses must not fill the memory."""
_ADDRESS = re.compile(r"\b([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuName:
    """What is known of which GPU it is: `index` None, `uuid` and `pci` empty where it is not."""

    index: int | None = None
    uuid: str = ""
    pci: str = ""

    def __str__(self) -> str:
        who = f"GPU {self.index}" if self.index is not None else f"the GPU at {self.pci}" if self.pci else "a GPU"
        return f"{who} ({self.uuid})" if self.uuid else who

    def agrees_with(self, other: "GpuName") -> bool:
        """Whether both name one GPU: something is known to both, and the most telling of it is the same."""
        for mine, its in ((self.uuid, other.uuid), (self.pci, other.pci), (self.index, other.index)):
            if mine not in {"", None} and its not in {"", None}:
                return mine == its
        return False

    def with_more(self, other: "GpuName") -> "GpuName":
        """The name, completed by what `other` knows."""
        index = self.index if self.index is not None else other.index
        return GpuName(index=index, uuid=self.uuid or other.uuid, pci=self.pci or other.pci)


def pci_address(text: str) -> str:
    """`domain:bus:device` in lower case, as the driver writes it; empty if `text` holds no such address."""
    found = _ADDRESS.search(text)
    if not found:
        return ""
    domain, bus, device = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


@dataclass(slots=True)
class GpuNames:
    """Which names belong together, learned from whoever knows; the newest word counts."""

    _known: list[GpuName] = field(default_factory=list)

    def learn(self, name: GpuName) -> None:
        """Take in names of one GPU."""
        merged = self.complete(name)
        others = [known for known in self._known if not known.agrees_with(merged)]
        self._known = [merged, *others][:MAX_GPUS]

    def complete(self, name: GpuName) -> GpuName:
        """`name` with what is known besides."""
        return next((name.with_more(known) for known in self._known if known.agrees_with(name)), name)

    def of_index(self, index: int) -> GpuName:
        """The GPU of that index, with what is known besides."""
        return self.complete(GpuName(index=index))
