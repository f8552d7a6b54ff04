"""The names of the node's GPUs, as far as the NVIDIA driver's files tell them without being asked a question that can hang."""

import re
from pathlib import Path

from unicron_lib.detection.gpu_names import GpuName, pci_address

_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,64})")


def has_driver(root: Path = Path("/")) -> bool:
    """Whether the NVIDIA driver is loaded."""
    return (root / "proc/driver/nvidia").is_dir() or (root / "dev/nvidiactl").exists()


def listed_gpus(root: Path = Path("/")) -> tuple[GpuName, ...]:
    """The GPUs that the driver lists, in the order of their addresses and so of NVML's indices; none without a driver."""
    try:
        folders = sorted((root / "proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return ()
    return tuple(
        GpuName(index=index, uuid=_uuid(folder / "information"), pci=pci_address(folder.name))
        for index, folder in enumerate(folders)
    )


def imagined_gpus(num_gpus: int) -> tuple[GpuName, ...]:
    """Addresses for GPUs that do not exist, so that faults can be injected into a node without any."""
    return tuple(GpuName(index=index, pci=f"0000:{index + 1:02x}:00") for index in range(num_gpus))


def _uuid(information: Path) -> str:
    try:
        found = _UUID.search(information.read_text(errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""
