"""The GPUs of this node as the kernel shows them, without asking the driver, which may hang."""

from pathlib import Path


def num_devices(root: Path = Path("/")) -> int:
    """How many GPUs have a device file."""
    return len(list((root / "dev").glob("nvidia[0-9]*")))


def gpu_model(root: Path = Path("/")) -> str:
    """What the driver calls the node's GPUs, such as `NVIDIA H100 80GB HBM3`; "" without a driver or if it does not say."""
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        told = (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
        return next((name for name in told if name), "")
    return ""
