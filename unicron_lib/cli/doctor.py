"""`unicron doctor`: is everything here that Unicron needs, and if not, what to do."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from unicron_lib.cli.options import AsJson, print_json
from unicron_lib.cli.target import find_target

Finding = dict[str, str | bool]
PACKAGES = ("prefect", "torch", "megatron-core", "nvidia-ml-py", "cvxpy", "highspy", "boto3", "moto", "psutil")


def doctor(
    as_json: AsJson = False,
    prefect: Annotated[
        bool,
        typer.Option("--prefect", help="Also prove that one Prefect event starts exactly one recovery run."),
    ] = False,
) -> None:
    """Check this installation; exit code 1 if something that is needed is missing."""
    findings = [check() for check in CHECKS]
    if prefect:
        findings += _prefect()
    if as_json:
        print_json({"ok": all(finding["ok"] for finding in findings), "findings": findings})
    else:
        for finding in findings:
            sys.stdout.write(f"{'ok  ' if finding['ok'] else 'FAIL'}  {finding['what']}: {finding['found']}\n")
    raise typer.Exit(0 if all(finding["ok"] for finding in findings) else 1)


def _finding(what: str, *, ok: bool, found: str) -> Finding:
    return {"what": what, "ok": ok, "found": found}


def _python() -> Finding:
    version = sys.version.split()[0]
    ok = sys.version_info[:2] == (3, 11)
    return _finding("Python", ok=ok, found=version if ok else f"{version}: megatron-core 0.16 needs 3.11, run `make setup`")


def _packages() -> Finding:
    missing = []
    for name in PACKAGES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    told = f"missing: {', '.join(missing)}: run `make setup`" if missing else f"{len(PACKAGES)} present"
    return _finding("packages", ok=not missing, found=told)


def _solver() -> Finding:
    import cvxpy

    ok = "HIGHS" in cvxpy.installed_solvers()
    return _finding(
        "solver",
        ok=ok,
        found="HiGHS" if ok else "cvxpy does not find HiGHS: run `make setup`; until then the dynamic programme plans",
    )


def _devices() -> Finding:
    from unicron_lib.cli.devices import num_cuda_devices

    count = num_cuda_devices()
    if isinstance(count, str):
        return _finding("training devices", ok=False, found=count)
    return _finding(
        "training devices", ok=True, found=f"{count} CUDA devices, NCCL" if count else "no CUDA device: CPU and gloo"
    )


def _nvml() -> Finding:
    from unicron_lib.cli.devices import gpu_watch

    ok, found = gpu_watch()
    return _finding("NVML", ok=ok, found=found)


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    ok = free > 6
    return _finding("memory", ok=ok, found=f"{free:.0f} GiB free" + ("" if ok else ": the demo needs 6"))


def _disk() -> Finding:
    free = shutil.disk_usage(Path.home() if Path.home().exists() else Path.cwd()).free / 2**30
    ok = free > 1
    return _finding("disk", ok=ok, found=f"{free:.0f} GiB free" + ("" if ok else ": make room for logs and checkpoints"))


def _prefect() -> list[Finding]:
    """What `flows.smoke` finds, in a process of its own; takes a minute, since the automation is a patient one."""
    env = find_target().env
    done = subprocess.run([sys.executable, "-m", "flows.smoke"], env=dict(env), capture_output=True, text=True, check=False)
    try:
        findings: list[Finding] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines() or ["without a word"]
        return [_finding("Prefect", ok=False, found=f"the smoke test broke off: {words[-1]}")]
    return findings


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _packages, _solver, _devices, _nvml, _memory, _disk)
