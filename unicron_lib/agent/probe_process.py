"""`python -m unicron_lib.agent.probe_process`: asks the driver, in a process of its own that may hang instead of the agent.

It looks at the GPUs once for each line on its standard input and tells of Xids when they happen, as JSON lines on its
standard output (`probe_messages`). It ends with its input, with its parent, and when the driver cannot be asked: a new
process then begins anew with the driver, which is the surest way to.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

from unicron_lib.adapters.nvml import NvmlAbsent, open_nvml
from unicron_lib.adapters.nvml_events import XidEvents
from unicron_lib.agent.forkserver import die_with_parent
from unicron_lib.agent.probe_messages import Closed, FromProbe, Look, Opened, Started, XidSeen

HANG = "hang"
"""As the only argument, for a drill: be a process whose driver never answers."""

_speaking = threading.Lock()


def say(message: FromProbe) -> None:
    """Print a message as one line, whichever thread it comes from."""
    line = json.dumps(asdict(message))
    with _speaking:
        print(line, flush=True)  # noqa: T201  # what this process is for


def main() -> int:
    """Serve until the input ends."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's to handle
    say(Started())
    while sys.argv[1:] == [HANG]:
        signal.pause()
    nvml = open_nvml()
    if isinstance(nvml, NvmlAbsent):
        return _close(nvml)
    events = XidEvents()
    say(Opened(driver=nvml.driver, off=(*nvml.off, *events.off)))
    # keeps no process alive: a wait for events of a hanging driver never returns
    threading.Thread(target=_tell_events, args=(events,), name="xid-events", daemon=True).start()
    for _ in sys.stdin:
        gpus = nvml.read()
        if isinstance(gpus, NvmlAbsent):
            return _close(gpus)
        say(Look(gpus=gpus))
    return 0


def _close(absent: NvmlAbsent) -> int:
    say(Closed(reason=absent.reason, no_driver=absent.no_driver))
    return 0


def _tell_events(events: XidEvents) -> None:
    for event in events:
        say(XidSeen(gpu=event.gpu, uuid=event.uuid, xid=event.xid))


if __name__ == "__main__":
    sys.exit(main())
