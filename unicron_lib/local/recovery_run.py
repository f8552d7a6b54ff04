"""One run of `unicron bench recovery`: all systems in turn, in a directory of its own; nothing is left."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType

from unicron_lib.errors import UserError
from unicron_lib.local.outages import FAULTS, Fault, Outage
from unicron_lib.local.recovery_baselines import torchft, torchrun
from unicron_lib.local.recovery_trials import Found, Say, Trials, ours
from unicron_lib.local.strikes import BenchStopped, NotInstalled

OURS = "unicron"
Measured = list[tuple[str, Fault, Outage]]
Trial = Callable[[Trials], AsyncGenerator[Found, None]]
SYSTEMS: Mapping[str, Trial] = MappingProxyType({OURS: ours, "torchrun": torchrun, "torchft": torchft})


def run(faults: Sequence[str], systems: Sequence[str], repeat: int, say: Say) -> tuple[Measured, list[str]]:
    """What each fault cost in each system, and why something was not measured.

    Raises UserError for a word that means nothing, UnicronError if our own part failed, KeyboardInterrupt or CancelledError
    after Ctrl-C or SIGTERM.
    """
    kinds = [_fault(word) for word in faults]
    _refuse_unknown(systems)
    home = Path(tempfile.mkdtemp(prefix="unicron-recovery-"))
    trials = Trials(faults=kinds, repeat=repeat, home=home, say=say)
    try:
        found = asyncio.run(_interruptible(trials, systems))
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutil.rmtree(home, ignore_errors=True)
        raise
    if not any(str(home) in note for note in found[1]):
        shutil.rmtree(home, ignore_errors=True)
    return found


def _fault(word: str) -> Fault:
    choices = [fault for fault in Fault if fault is not Fault.GROWTH]
    if word not in choices:
        raise UserError(f"--faults {word}: choose of {', '.join(choices)}")
    return Fault(word)


def _refuse_unknown(systems: Sequence[str]) -> None:
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        raise UserError(f"--systems {unknown[0]}: choose of {', '.join(SYSTEMS)}")


async def _interruptible(trials: Trials, systems: Sequence[str]) -> tuple[Measured, list[str]]:
    """Turn SIGTERM and Ctrl-C into a cancellation, so that all is stopped."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    measured: Measured = []
    notes: list[str] = []
    for name in systems:
        try:
            async with aclosing(SYSTEMS[name](trials)) as trial:
                async for fault, outage in trial:
                    trials.say(f"{name}: {FAULTS[fault]}: {outage.stalled_s:.2f} s without progress")
                    measured.append((name, fault, outage))
        except NotInstalled as missing:
            notes.append(str(missing))
        except BenchStopped as stopped:
            if name == OURS:
                raise
            notes.append(f"{name}: {stopped}: see {trials.home}")
    return measured, notes
