"""Options that several commands share, and how they print."""

import json
import sys
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def say(text: str) -> None:
    """A line for people, on stderr, so that stdout stays clean."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
