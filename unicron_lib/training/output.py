"""Where a rank's output goes: a file for each generation, also if its process lives through several of them."""

import logging
import os
import sys
from pathlib import Path

log = logging.getLogger(__name__)


def write_to(file: str | None) -> None:
    """Have all output of this process go to `file`, C++'s too; it stays where it is if that cannot be."""
    if not file:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        log.warning("the output stays where it is: %s", error)
        return
    for own in (1, 2):
        os.dup2(out, own)
    os.close(out)
