"""What drivers say of this machine, asked in processes of their own: a driver that hangs keeps whoever asks it for ever."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from unicron_lib.agent.probe_life import COMMAND, from_probe
from unicron_lib.agent.probe_messages import Closed, Opened

ANSWER_S = 40.0
"""For Python to start, torch to load, and a driver without persistence mode to wake eight GPUs."""
COUNT_DEVICES = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
GOODBYE_S = 1.0


def gpu_watch(*, deadline_s: float = ANSWER_S) -> tuple[bool, str]:
    """Whether GPU health can be watched, or there is no GPU to watch, and a sentence about it."""
    told, has_ended = _ask(COMMAND, deadline_s)
    for line in told.splitlines():
        match from_probe.validate_json(line):
            case Opened(driver=driver):
                return True, f"driver {driver}" if driver else "driver found"
            case Closed(no_driver=True):
                return True, "no NVIDIA driver: GPU health is not watched"
            case Closed(reason=reason):
                return False, f"{reason}: GPU health is not watched"
    return False, _silence("the NVIDIA driver", has_ended=has_ended, deadline_s=deadline_s)


def num_cuda_devices(*, deadline_s: float = ANSWER_S) -> int | str:
    """How many CUDA devices torch finds, or a sentence on why it is not known."""
    told, has_ended = _ask(COUNT_DEVICES, deadline_s)
    number = told.strip()
    return int(number) if number.isdecimal() else _silence("torch", has_ended=has_ended, deadline_s=deadline_s)


def _silence(who: str, *, has_ended: bool, deadline_s: float) -> str:
    if has_ended:
        return f"the process that asked {who} ended without an answer: see the kernel's log"
    return f"{who} has not answered for {deadline_s:g} s: see the kernel's log, and restart the node if the driver hangs"


def _ask(command: Sequence[str], deadline_s: float) -> tuple[str, bool]:
    """What the command prints, and whether it ended in time; else it is killed, and not waited for if it is stuck."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        told, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GOODBYE_S)
        said = error.output or b""  # bytes, whatever was asked for
        return said.decode() if isinstance(said, bytes) else said, False
    return told, True
