"""The process behind `unicron up`: holds a local cluster until it is told to end.

SIGTERM ends the cluster, SIGHUP brings lost nodes back.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from unicron_lib.errors import UnicronError
from unicron_lib.local.cluster import running
from unicron_lib.local.site import PREFECT_FILE, Site, create_site, save_site

READY = "ready"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _serve(arguments: argparse.Namespace) -> None:
    site = create_site(
        arguments.home,
        num_nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        with_s3=False,
        prefect_port=arguments.prefect_port,
        controller_port=arguments.controller_port,
    )
    hold = asyncio.create_task(_hold(replace(site, supervisor_pid=os.getpid())))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, hold.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await hold


async def _hold(site: Site) -> None:
    async with running(site, _say, PREFECT_FILE) as cluster:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, cluster.start_missing_nodes)
        save_site(site)
        _say(READY)
        await asyncio.Event().wait()


def main() -> int:
    """`python -m unicron_lib.local.serve --home DIR --nodes N --gpus-per-node G`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--prefect-port", type=int, default=0)
    parser.add_argument("--controller-port", type=int, default=0)
    try:
        asyncio.run(_serve(parser.parse_args()))
    except UnicronError as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
