"""`unicron nodes --check`: which nodes are faulty."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from unicron_lib.cli.options import print_json, say
from unicron_lib.errors import UnicronError, UserError

if TYPE_CHECKING:
    from unicron_lib.cli.target import Target

FOUND_FAULTY, USAGE = 1, 2


def show_check(target: "Target", names: Sequence[str], *, as_json: bool) -> None:
    """Run the check, print the findings, and exit with 1 if a node is faulty. Raises UserError for one that trains."""
    code, rows = _run(target, names)
    if as_json:
        print_json({"nodes": rows})
    elif rows:
        _print(rows)
    else:
        say("no node is idle: there is nothing to check")
    if code:
        raise typer.Exit(FOUND_FAULTY)


def _run(target: "Target", names: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """In a process of its own, since importing Prefect takes seconds."""
    command = [sys.executable, "-m", "flows.checking", *names]
    done = subprocess.run(command, env=dict(target.env), capture_output=True, text=True, check=False)
    words = done.stdout.strip().splitlines()
    if done.returncode in {0, FOUND_FAULTY} and words and words[-1].startswith("["):
        return done.returncode, json.loads(words[-1])
    told = done.stderr.strip().splitlines() or ["it ended without a word"]
    error = UserError if done.returncode == USAGE else UnicronError
    raise error(told[-1].removeprefix("unicron: "))


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from unicron_lib.cli.options import console

    table = Table("node", "verdict", "why", box=None)
    for row in rows:
        table.add_row(row["node"], row["verdict"], escape(row["reason"]))
    console().print(table)
