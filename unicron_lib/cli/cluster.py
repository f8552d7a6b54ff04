"""`unicron up` and `unicron down`: a local cluster that stays."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.errors import UnicronError, UserError

START_S = 240.0


def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 4,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks that a node can hold.")] = 2,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect UI; 0 picks a free one.")] = 0,
    controller_port: Annotated[int, typer.Option(help="Port of the controller; 0 picks a free one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Start a local cluster that stays; on a running one, bring lost nodes back."""
    from unicron_lib.local.site import default_home, load_site

    home = default_home()
    running = _running(home)
    if running:
        os.kill(running, signal.SIGHUP)
        say("a cluster is running already, with its own size: lost nodes are being started again")
    else:
        _start(home, nodes, gpus_per_node, prefect_port, controller_port)
    site = load_site(home)
    if as_json:
        print_json(
            {"ui_url": site.ui_url, "controller_url": site.controller_url, "store_url": site.store_url, "home": site.home}
        )
    else:
        say(f"Prefect UI: {site.ui_url}\nnext: unicron submit infra/jobs/gpt-a.yaml; unicron status --watch; unicron down")


def down(as_json: AsJson = False) -> None:
    """Stop the local cluster. Its journal and checkpoints stay: `unicron up` goes on from them."""
    from unicron_lib.local.processes import sweep
    from unicron_lib.local.site import default_home, load_site

    site = load_site()
    pid = _running(default_home())
    if pid:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while _is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    left = sweep(site.cluster_id)
    (site.path / "cluster.json").unlink(missing_ok=True)
    if as_json:
        print_json({"stopped": True, "killed": left})
    else:
        say("the cluster is stopped")


def _running(home: Path) -> int:
    from unicron_lib.local.site import load_site

    with suppress(UserError):
        pid = load_site(home).supervisor_pid
        return pid if _is_alive(pid) else 0
    return 0


def _is_alive(pid: int) -> bool:
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any("unicron_lib.local.serve" in part for part in process.cmdline())
    return False


def _start(home: Path, nodes: int, gpus_per_node: int, prefect_port: int, controller_port: int) -> None:
    log = home / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (home / "cluster.json").unlink(missing_ok=True)
    arguments = ["-m", "unicron_lib.local.serve", "--home", str(home), "--nodes", str(nodes)]
    arguments += ["--gpus-per-node", str(gpus_per_node), "--prefect-port", str(prefect_port)]
    arguments += ["--controller-port", str(controller_port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _follow(process, log)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        say("interrupted: the cluster is stopped")
        raise


def _follow(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Pass on what the supervisor says until it is ready."""
    deadline = time.monotonic() + START_S
    told = 0
    while time.monotonic() < deadline:
        lines = log.read_text(errors="replace").splitlines()
        for line in lines[told:]:
            if line == "ready":
                return
            say(line)
        told = len(lines)
        if process.poll() is not None:
            raise UnicronError(f"the cluster did not start: {lines[-1] if lines else 'no output'}; see {log}")
        time.sleep(0.1)
    process.terminate()
    raise UnicronError(f"the cluster did not start within {START_S:.0f} s; see {log}")
