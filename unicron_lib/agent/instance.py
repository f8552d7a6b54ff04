"""Where this machine can be told about its own end: by the metadata service of EC2, or nowhere."""

from collections.abc import Mapping
from pathlib import Path

from unicron_lib.errors import UserError

LINK_LOCAL = "http://169.254.169.254"
AUTO, OFF = "auto", "off"


def notices_from(wanted: str, env: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """The service's address, None if nobody is to be asked. `wanted` is `auto`, `off` or an address.

    `auto` heeds the variables that botocore knows, and asks only where the machine says that it is an EC2 instance. Raises
    UserError.
    """
    if wanted.startswith(("http://", "https://")):
        return wanted.rstrip("/")
    if wanted not in {AUTO, OFF}:
        raise UserError(f"--spot-notices is {wanted!r}: give {AUTO}, {OFF} or the address of a metadata service, http://HOST")
    if wanted == OFF or env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    named = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/")
    return named or (LINK_LOCAL if _is_ec2(root) else None)


def _is_ec2(root: Path) -> bool:
    """Whether the firmware (Nitro) or the hypervisor (Xen) says so."""
    return _read(root / "sys/class/dmi/id/sys_vendor") == "Amazon EC2" or _read(root / "sys/hypervisor/uuid").startswith("ec2")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
