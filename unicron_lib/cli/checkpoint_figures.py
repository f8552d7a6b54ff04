"""`unicron bench checkpoint`: a local S3 server, and what checkpoints cost against it."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unicron_lib.cli.options import console, say
from unicron_lib.errors import StoreError

if TYPE_CHECKING:
    from unicron_lib.training.trial_cost import Cost

BUCKET = "unicron-bench"
NEEDED = 8
"""So many times the state must fit into free memory: the local server keeps its objects there, some of them twice."""
PATIENCE_S = 60.0


def affordable(num_parameters: int) -> int:
    """As many of these parameters as there is memory for; says so if it is fewer."""
    import psutil

    from unicron_lib.training.checkpoint_trial import BYTES_PER_PARAMETER

    most = int(psutil.virtual_memory().available / (BYTES_PER_PARAMETER * NEEDED))
    if most < num_parameters:
        say(f"memory is short: {most / 1e6:.0f} instead of {num_parameters / 1e6:.0f} million parameters")
    return min(most, num_parameters)


def measure(num_parameters: int, rounds: int) -> "Iterator[Cost]":
    """Measure with so many parameters against a local server that is stopped afterwards."""
    with _server():
        from unicron_lib.training.checkpoint_trial import measure as costs

        yield from costs(BUCKET, num_parameters=num_parameters, rounds=rounds)


@contextmanager
def _server() -> Iterator[None]:
    from unicron_lib.adapters.s3 import make_bucket
    from unicron_lib.local.processes import Program, free_port, start

    port = free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        server = start(Program(name="s3", arguments=arguments, log=Path(folder) / "s3.log"), os.environ)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    make_bucket(BUCKET)
                    break
                except StoreError:
                    if time.monotonic() > deadline or server.poll() is not None:
                        raise
            yield
        finally:
            server.kill()
            server.wait()


def show(costs: "Sequence[Cost]", num_parameters: int) -> None:
    """The figures as a table."""
    from rich.table import Table

    table = Table("", "what", title=f"Checkpoints of {num_parameters / 1e6:.0f} million parameters on this machine")
    for name in ("here", "beside", "there", "ratio", "bar"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    for it in costs:
        bar = "" if it.bar is None else f"{'<=' if it.at_most else '>='} {it.bar:g}"
        verdict = "ok" if it.ok else "MISSED"
        digits = 3 if it.unit == "s" else 0
        figures = (f"{it.value:.{digits}f} {it.unit}", it.beside, f"{it.other:.{digits}f} {it.unit}", f"{it.ratio:.3f}", bar)
        table.add_row(verdict, it.what, *figures)
    console().print(table)
