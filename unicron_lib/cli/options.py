"""Options that several commands share, and how they print."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 130
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def console() -> "Console":
    """Where tables go: as wide as the terminal, wide enough for them where there is none."""
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def write_text(path: Path, text: str) -> None:
    """A file of what a command makes. Raises UserError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def say(text: str) -> None:
    """A line for people, on stderr, so that stdout stays clean."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
