"""What a process says by the way it ends: exit codes and signals that have a meaning, as a table."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from unicron_lib.domain.failures import ErrorKind

SHELL_OFFSET = 128
"""A shell, and a rank that ends itself on a signal, tell signal n as exit code 128 + n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The meaning of an end. One that `is_final` outdoes what the process said before; `verdict` as in Failure."""

    kind: ErrorKind = ErrorKind.PROCESS_EXIT
    verdict: Literal["", "exclude", "exclude_and_stop", "stop"] = ""
    text: str = ""
    is_final: bool = False


_K = ErrorKind
CODES: Mapping[int, Exit] = MappingProxyType(
    {
        16: Exit(
            kind=_K.CUDA_ERROR,
            verdict="exclude",
            is_final=True,
            text="Megatron asks for another GPU: this one gave an unexpected result twice",
        ),
        17: Exit(
            kind=_K.CUDA_ERROR,
            verdict="exclude_and_stop",
            is_final=True,
            text="Megatron's result validation failed: the GPU computes wrongly",
        ),
        93: Exit(kind=_K.USER_ERROR, verdict="stop", is_final=True, text="the process asks not to be started again"),
        126: Exit(kind=_K.USER_ERROR, verdict="stop", is_final=True, text="a program of its command cannot be run on its node"),
        127: Exit(kind=_K.USER_ERROR, verdict="stop", is_final=True, text="a program of its command is not on its node"),
        201: Exit(kind=_K.GPU_DRIVER_ERROR, is_final=True, text="GPU driver error, in DLRover's code"),
        247: Exit(kind=_K.OUT_OF_MEMORY, is_final=True, text="out of memory, in DLRover's code"),
    }
)
"""Shells: 126 and 127; Megatron-core: 16 and 17; NVIDIA's resiliency extension: 93; DLRover: 201 and 247.

Megatron's are those of `megatron/core/rerun_state_machine.py`, which repeats an iteration whose result is unexpected. 16,
EXIT_CODE_RESUME_TO_DISAMBIGUATE: the same again on the same GPU, so it wants to go on from its checkpoint on another one. 17,
EXIT_CODE_FAILED_ON_RESULT_VALIDATION: it knows what it was, a GPU that computes wrongly, now or always, or the program.
"""

SIGNALS: Mapping[int, Exit] = MappingProxyType(
    {
        signal.SIGKILL: Exit(text="killed from outside, and not for memory as far as the kernel's records tell"),
        signal.SIGTERM: Exit(text="terminated from outside, and not by its agent"),
        signal.SIGABRT: Exit(text="it gave itself up: an assertion or an uncaught C++ exception, see the rank's log"),
        signal.SIGSEGV: Exit(text="segmentation fault in native code"),
        signal.SIGBUS: Exit(text="bus error: often /dev/shm or another mapped file is full"),
        signal.SIGILL: Exit(text="illegal instruction: the program may be built for another processor"),
        signal.SIGFPE: Exit(text="integer division by zero in native code"),
        signal.SIGXCPU: Exit(text="it used up its CPU time limit"),
    }
)


def signal_of(code: int) -> int:
    """The signal that an exit code tells of, also through a shell; 0 if of none."""
    if code < 0:
        return -code
    return code - SHELL_OFFSET if code - SHELL_OFFSET in SIGNALS else 0


def meaning_of(code: int, *, out_of_memory: bool = False) -> Exit:
    """What an exit code (negative for a signal) means; `out_of_memory` is the kernel's word that it killed for memory."""
    if out_of_memory:
        return Exit(kind=ErrorKind.OUT_OF_MEMORY, text="out of memory: the kernel killed it", is_final=True)
    return CODES.get(code) or SIGNALS.get(signal_of(code)) or Exit()


def describe(code: int) -> str:
    """How it ended, in words."""
    if not (number := signal_of(code)):
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was killed by {name}" if code < 0 else f"ended with exit code {code}, which stands for {name}"
