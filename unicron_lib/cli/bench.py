"""`unicron bench`: figures as ratios, measured side by side in one run."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_lib.cli.options import AsJson, print_json, say

if TYPE_CHECKING:
    from unicron_lib.cli.detection_figures import Latency
    from unicron_lib.cli.diagnosis_figures import Reading
    from unicron_lib.cli.overhead_figures import Overhead
    from unicron_lib.cli.planner_figures import Figure
    from unicron_lib.cli.simulator_figures import Simulated
    from unicron_lib.detection.trial import Verdict
    from unicron_lib.local.outages import Fault, Outage

group = typer.Typer(help="Measure a part of Unicron on this machine.", no_args_is_help=True)


@group.command()
def planner(as_json: AsJson = False) -> None:
    """Times of allocation, plan table, look-up and placement, with right answers; exit code 1 if a bar is missed."""
    from unicron_lib.cli.bench_tables import show_planner

    figures = []
    for figure in _figures():
        say(f"measured: {figure.what}")
        figures.append(figure)
    ok = all(figure.ok for figure in figures)
    if as_json:
        print_json({"ok": ok, "figures": [_as_json(figure) for figure in figures]})
    else:
        show_planner(figures)
    raise typer.Exit(0 if ok else 1)


@group.command()
def detection(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each fault is done.")] = 10, as_json: AsJson = False
) -> None:
    """How soon each kind of failure is seen, on real processes, and simulated days; exit code 1 if a bar is missed.

    Takes about half a minute a round; leave the machine alone meanwhile.
    """
    from unicron_lib.cli.bench_tables import show_detection
    from unicron_lib.cli.detection_figures import KINDS, TRIALS
    from unicron_lib.cli.simulate import progress

    with progress(rounds * KINDS + len(TRIALS), "measuring") as done:
        latencies, verdicts = asyncio.run(_latencies(rounds, done)), _verdicts(done)
    ok = all(latency.ok for latency in latencies) and all(verdict.ok for verdict in verdicts.values())
    if as_json:
        figures = [_as_json(latency) | {"median": latency.median, "p95": latency.p95} for latency in latencies]
        trials = {name: _trial_as_json(verdict) for name, verdict in verdicts.items()}
        print_json({"ok": ok, "figures": figures, "trials": trials})
    else:
        show_detection(latencies, verdicts)
    raise typer.Exit(0 if ok else 1)


@group.command()
def overhead(
    pairs: Annotated[int, typer.Option(min=2, max=10_000, help="Pairs of blocks; each takes half a second.")] = 240,
    as_json: AsJson = False,
) -> None:
    """What monitoring costs an iteration of 50 ms, with and without it in one run.

    Exit code 1 above 0.5%, and if not even what the rank itself spends on it shows that this is held.
    """
    from unicron_lib.cli.bench_tables import show_overhead

    found = asyncio.run(_overhead(pairs))
    print_json(_as_json(found) | {"verdict": found.verdict}) if as_json else show_overhead(found)
    raise typer.Exit(0 if found.ok else 1)


@group.command()
def checkpoint(
    parameters_m: Annotated[
        int, typer.Option(min=1, max=10_000, help="Millions of parameters; fewer if memory is short for them.")
    ] = 100,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each is measured, in turn.")] = 3,
    as_json: AsJson = False,
) -> None:
    """How long saving holds training up, and how fast checkpoints move, beside others; exit code 1 if a bar is missed."""
    from unicron_lib.cli.checkpoint_figures import affordable, measure, show

    num_parameters = affordable(parameters_m * 10**6)
    costs = []
    for cost in measure(num_parameters, rounds):
        say(f"measured: {cost.what}, beside {cost.beside}")
        costs.append(cost)
    ok = all(cost.ok for cost in costs)
    if as_json:
        print_json({"ok": ok, "parameters": num_parameters, "figures": [asdict(cost) | {"ok": cost.ok} for cost in costs]})
    else:
        show(costs, num_parameters)
    raise typer.Exit(0 if ok else 1)


@group.command()
def diagnosis(
    size_mb: Annotated[int, typer.Option(min=1, max=10_000, help="Megabytes of the log that is made and read.")] = 200,
    as_json: AsJson = False,
) -> None:
    """How fast a log is read and in how much memory, with the right answer; exit code 1 if a bar is missed."""
    from unicron_lib.cli.bench_tables import show_diagnosis
    from unicron_lib.cli.diagnosis_figures import measure

    readings = list(measure(size_mb))
    ok = all(reading.ok for reading in readings)
    if as_json:
        print_json({"ok": ok, "figures": [_as_json(it) | {"mb_per_s": it.mb_per_s} for it in readings]})
    else:
        show_diagnosis(readings)
    raise typer.Exit(0 if ok else 1)


@group.command()
def loss(
    curves: Annotated[int, typer.Option(min=10, max=100_000, help="Simulated curves of each sort.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """How often the loss guard raises a false alarm or misses harm; exit code 1 for a false one or more than 2% missed."""
    from unicron_lib.cli.options import console
    from unicron_lib.detection.loss_trial import judge_curves

    found = judge_curves(curves)
    ok = found.false_rollbacks == 0 and found.rolled_back >= 0.98 * found.harmed
    if as_json:
        print_json({"ok": ok} | asdict(found))
    else:
        text = (
            f"{found.curves} curves that nothing was wrong with: {found.false_rollbacks} were rolled back. "
            f"{found.spikes_told} of {found.spikes} spikes that passed were told, {found.false_spikes} that were none.\n"
            f"{found.harmed} curves that diverged: {found.rolled_back} were rolled back, within {found.slowest} iterations, "
            f"at most {found.worst_aim} iterations beside the harm."
        )
        console().print(text)
    raise typer.Exit(0 if ok else 1)


@group.command()
def simulator(
    days: Annotated[float, typer.Option(min=0.1, max=3650, help="Simulated days of the 100,000 GPUs.")] = 365.0,
    as_json: AsJson = False,
) -> None:
    """Times and memory of the simulator, on the paper's trace and on 100,000 GPUs; exit code 1 if a bar is missed."""
    from unicron_lib.cli.simulate_tables import show_bench
    from unicron_lib.cli.simulator_figures import measure

    figures = []
    for figure in measure(days=days):
        say(f"measured: {figure.what}")
        figures.append(figure)
    ok = all(figure.ok for figure in figures)
    if as_json:
        print_json({"ok": ok, "figures": [_as_json(figure) | {"times_real": figure.times_real} for figure in figures]})
    else:
        show_bench(figures)
    raise typer.Exit(0 if ok else 1)


@group.command()
def recovery(
    faults: Annotated[
        str, typer.Option(help="Of sev3 (an exception), sev2 (SIGKILL of a rank), sev1 (SIGKILL of a node, two jobs).")
    ] = "sev3,sev2,sev1",
    repeat: Annotated[int, typer.Option(min=1, max=100, help="How often each fault is done.")] = 5,
    systems: Annotated[
        str, typer.Option(help="Of unicron, torchrun, and torchft if it is installed.")
    ] = "unicron,torchrun,torchft",
    as_json: AsJson = False,
) -> None:
    """What a failure costs a training: here, under torchrun and torchft, at the same place; exit code 1 if a bar is missed.

    Takes some minutes; 130 after Ctrl-C, with everything stopped.
    """
    from unicron_lib.cli.recovery_figures import bars, recoveries
    from unicron_lib.cli.recovery_tables import recovery_object, show_recovery

    measured, notes = _outages(_words(faults), _words(systems), repeat)
    found = recoveries(measured)
    held = bars(found, ours="unicron", other="torchrun")
    for note in notes:
        say(note)
    print_json(recovery_object(found, held, notes)) if as_json else show_recovery(found, held, against="torchrun")
    raise typer.Exit(0 if all(bar.ok for bar in held) else 1)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _figures() -> "Iterator[Figure]":
    from unicron_lib.cli import planner_figures as measure

    yield measure.cold_process(bar_s=2.5)
    yield measure.allocations(num_jobs=16, num_gpus=128, bar_s=0.01)
    yield measure.allocations(num_jobs=128, num_gpus=4096, largest=128, bar_s=0.05)
    yield measure.allocations(num_jobs=128, num_gpus=32768, step=8, largest=1024, bar_s=0.2)
    yield from measure.tables(num_jobs=128, num_gpus=4096, largest=128, bar_s=1.0, lookup_bar_s=0.001)
    yield measure.placements(num_jobs=16, num_nodes=128, bar_s=0.05)
    yield measure.placements(num_jobs=16, num_nodes=128, nodes_per_rack=16, bar_s=0.05)
    yield from measure.between_pools(num_jobs=24, num_gpus=128, num_pools=3, bar_s=0.05, moving_bar_s=10.0)


def _outages(faults: list[str], systems: list[str], repeat: int) -> "tuple[list[tuple[str, Fault, Outage]], list[str]]":
    from unicron_lib.local.recovery_run import run

    try:
        return run(faults, systems, repeat, say)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("unicron: interrupted, everything is stopped")
        raise typer.Exit(130) from None


async def _latencies(rounds: int, done: Callable[[], None]) -> "list[Latency]":
    from unicron_lib.cli.detection_figures import KINDS, Rounds, measure
    from unicron_lib.local.bench_cluster import bench_cluster

    found = []
    async with bench_cluster() as cluster:
        async for latency in measure(cluster, Rounds(number=rounds, done=done)):
            found.append(latency)
            say(f"measured {len(found)} of {KINDS}: {latency.what}, median {latency.median:.3g} {latency.unit}")
    return found


def _verdicts(done: Callable[[], None]) -> "dict[str, Verdict]":
    from unicron_lib.cli.detection_figures import TRIALS, try_detectors

    found = {}
    for name in TRIALS:
        found[name] = try_detectors(name)
        say(f"simulated: 24 hours of {name}")
        done()
    return found


def _trial_as_json(verdict: "Verdict") -> dict[str, Any]:
    rates = {"precision": verdict.precision, "recall": verdict.recall}
    return asdict(verdict) | rates | {"hang_bar": verdict.hang_bar, "promptness": verdict.promptness, "ok": verdict.ok}


async def _overhead(pairs: int) -> "Overhead":
    from unicron_lib.cli.overhead_figures import measure
    from unicron_lib.local.bench_cluster import bench_cluster

    say(f"measuring for about {pairs / 2:.0f} s")
    async with bench_cluster() as cluster:
        return await measure(cluster, pairs)


def _as_json(figure: "Figure | Latency | Overhead | Reading | Simulated") -> dict[str, Any]:
    return asdict(figure) | {"ok": figure.ok}
