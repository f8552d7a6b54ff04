"""A run outlives the worker that has started it, and that reads what it prints."""

import os
from contextlib import suppress

from rich.console import Console


def outlive_the_reader() -> None:
    """Go on in silence when nobody reads any more what this process prints.

    By rich, with which Prefect logs, the next line would end the process.
    """
    Console.on_broken_pipe = _fall_silent  # type: ignore[method-assign, assignment]


def _fall_silent(console: Console) -> None:
    console.quiet = True
    silence = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError):
        for own in (1, 2):
            os.dup2(silence, own)
    os.close(silence)
