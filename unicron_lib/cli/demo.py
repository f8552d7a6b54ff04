"""`unicron demo`: the main job."""

from typing import Annotated

import typer

from unicron_lib.cli.options import AsJson


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster running at the end, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Two trainings on a local cluster, a crash, a node loss: healed, and checked against an undisturbed run."""
    from unicron_lib.local.play import play

    raise typer.Exit(play(keep=keep, as_json=as_json))
