"""What a process leaves in the file that TORCHELASTIC_ERROR_FILE names: as torch's `@record` writes it, or anything."""

import json
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from unicron_lib.agent.excerpt import TEXT_LIMIT, excerpt

READ_LIMIT_BYTES = 1 << 20
"""Of a longer file only the head and the tail are read, which is no JSON any more."""
_UP_TO_THE_MESSAGE = re.compile(r'\A\s*\{\s*"message"\s*:\s*(\{\s*"message"\s*:\s*)?"')


def read_error_file(path: Path) -> str:
    """The message and the traceback in the file, at most TEXT_LIMIT characters; empty if there is none to be read.

    A rank writes the file and may write anything, or make it something that blocks its reader.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb"):
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                return excerpt(_told(_head_and_tail(descriptor, status.st_size)))
    return ""


def leave_error(message: str, traceback: str) -> None:
    """Write this process's exception into its file, if it has one, as torch's `@record` does; no loss if that fails."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _head_and_tail(descriptor: int, num_bytes: int) -> str:
    if num_bytes <= READ_LIMIT_BYTES:
        return os.pread(descriptor, READ_LIMIT_BYTES, 0).decode(errors="replace")
    head, tail = os.pread(descriptor, TEXT_LIMIT, 0), os.pread(descriptor, TEXT_LIMIT, num_bytes - TEXT_LIMIT)
    return f"{head.decode(errors='replace')}\n{tail.decode(errors='replace')}"


def _told(text: str) -> str:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return _UP_TO_THE_MESSAGE.sub("", text.strip())
    message = content.get("message", "") if isinstance(content, dict) else content
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    traceback = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return f"{message.get('message', '')}\n{traceback}".strip()
