"""Run the demo from beginning to end: a cluster in a directory of its own, the story, the checks, the report."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from unicron_lib.domain.cluster import ClusterState
from unicron_lib.errors import UnicronError
from unicron_lib.local.checks import Check, check_ends, check_incidents, check_journal, check_losses, check_samples
from unicron_lib.local.cluster import Say, running
from unicron_lib.local.demo import Demo
from unicron_lib.local.present import as_object, show
from unicron_lib.local.references import run_references
from unicron_lib.local.site import JOB_FILES, PREFECT_FILE, Site, create_site, save_site

JOBS = (JOB_FILES / "gpt-a.yaml", JOB_FILES / "gpt-b.yaml")
NUM_NODES = 4
GPUS_PER_NODE = 2


def play(*, keep: bool, as_json: bool) -> int:
    """Run the demo; 0 only if all that it claims held. Leaves nothing behind unless `keep`."""
    home = Path(tempfile.mkdtemp(prefix="unicron-demo-"))
    try:
        return asyncio.run(_interruptible(home, keep=keep, as_json=as_json))
    except UnicronError as error:
        sys.stderr.write(f"unicron: the demo failed: {error}\nlogs are in {home}\n")
        if as_json:
            sys.stdout.write(json.dumps({"ok": False, "error": str(error)}) + "\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("unicron: interrupted, everything is stopped\n")
        shutil.rmtree(home, ignore_errors=True)
        return 130


async def _interruptible(home: Path, *, keep: bool, as_json: bool) -> int:
    """Turn SIGTERM and Ctrl-C into a cancellation, so that the cluster is always stopped."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await _play(home, keep=keep, as_json=as_json)


async def _play(home: Path, *, keep: bool, as_json: bool) -> int:
    site = create_site(home, num_nodes=NUM_NODES, gpus_per_node=GPUS_PER_NODE, with_s3=True)
    os.environ.update(site.environment())
    say = _teller()
    say(f"starting a cluster of {NUM_NODES} nodes with {GPUS_PER_NODE} ranks each (logs in {site.logs})")
    async with running(site, say, PREFECT_FILE) as cluster:
        save_site(site)
        demo = Demo(cluster=cluster, files=JOBS, say=say)
        await demo.play_faults()
        references_task = asyncio.create_task(run_references(home, (demo.a, demo.b)))
        state = await demo.play_end()
        say("waiting for the undisturbed reference runs of the same seeds")
        references = await references_task
        checks = [*demo.checks, *await _check(demo, state, say)]
        checks += [check_losses(site.run_dir, spec, references[spec.job]) for spec in (demo.a, demo.b)]
        ok = all(check.ok for check in checks)
        report = as_object(state, site, checks, references)
        sys.stdout.write(json.dumps(report) + "\n") if as_json else show(state, site, checks)
        if keep:
            await _stay(site, say)
    if ok:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if ok else 1


def _teller() -> Say:
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {text}\n")
        sys.stderr.flush()

    return say


async def _check(demo: Demo, state: ClusterState, say: Say) -> list[Check]:
    say("both jobs are done; checking the journal and the ledgers")
    entries = await asyncio.to_thread(demo.journal.entries)
    specs = (demo.a, demo.b)
    samples = [check_samples(demo.cluster.site.run_dir, spec) for spec in specs]
    return [*check_ends(state, specs), *samples, *check_journal(state, entries), *check_incidents(state)]


async def _stay(site: Site, say: Say) -> None:
    say(f"the cluster stays until Ctrl-C: {site.ui_url}; in another shell: UNICRON_HOME={site.home} unicron status")
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
