"""The command line: `unicron COMMAND`. Heavy libraries are imported by the commands that need them."""

import sys

import typer

from unicron_lib.cli.accounts import accounts
from unicron_lib.cli.bench import group
from unicron_lib.cli.characterize import characterize
from unicron_lib.cli.checkpoints import checkpoints
from unicron_lib.cli.cluster import down, up
from unicron_lib.cli.demo import demo
from unicron_lib.cli.diagnose import diagnose
from unicron_lib.cli.doctor import doctor
from unicron_lib.cli.exchange import export, import_
from unicron_lib.cli.inject import inject
from unicron_lib.cli.jobs import cancel, submit
from unicron_lib.cli.look import explain, incidents, jobs, status
from unicron_lib.cli.nodes import nodes
from unicron_lib.cli.paper import paper
from unicron_lib.cli.plan import plan
from unicron_lib.cli.save import checkpoint
from unicron_lib.cli.simulate import simulate
from unicron_lib.errors import InfeasibleError, UnicronError, UserError

app = typer.Typer(
    name="unicron",
    help="A self-healing workload manager for concurrent LLM training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    *(demo, up, down, submit, cancel, status, nodes, jobs, incidents, explain, accounts),
    *(checkpoint, checkpoints, export, plan, simulate, paper, inject, diagnose, characterize, doctor),
):
    app.command()(command)
app.command("import")(import_)
app.add_typer(group, name="bench")


def main() -> None:
    """Run a command. Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 infeasible; an error is one line on stderr."""
    try:
        app()
    except UnicronError as error:
        sys.stderr.write(f"unicron: {error}\n")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


def exit_code(error: UnicronError) -> int:
    """3 for what is infeasible, 2 for another mistake of the user's, 1 for the rest."""
    return 3 if isinstance(error, InfeasibleError) else 2 if isinstance(error, UserError) else 1
