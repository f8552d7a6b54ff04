"""The rendezvous store of one generation, in a process of its own: it outlives any rank."""

import os
import signal
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PARENT_CHECK_S = 1.0


def main() -> None:
    """Serve a TCPStore on a free port until SIGTERM or the parent's death.

    Writes `{"port": n}` to the file that UNICRON_PORT_FILE names once the store answers.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()
    store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    _write_whole(Path(os.environ["UNICRON_PORT_FILE"]), f'{{"port": {store.port}}}\n')
    while signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_S) is None and os.getppid() == parent:
        pass


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)
