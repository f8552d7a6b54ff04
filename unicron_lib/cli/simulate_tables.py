"""What `unicron simulate` prints for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from unicron_lib.cli.options import console
from unicron_lib.cli.simulator_figures import BAR_MEMORY_MB, Simulated

MOST_BELOW, MOST_JOBS, MOST_COSTLY = 20, 64, 3


def show(answer: Mapping[str, Any]) -> None:
    """The policies side by side, the jobs under Unicron, and what numbers are no evidence."""
    screen = console()
    screen.print(_policies(answer))
    screen.print(_jobs(answer))
    for line in (*_notes(answer), *_below(answer["below"], answer["reference"])):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    screen.print(f"The same again: {answer['command']}", markup=False, highlight=False, soft_wrap=True)


def show_bench(figures: Sequence[Simulated]) -> None:
    """How fast the simulator is."""
    table = Table("", "simulated", title="The simulator on this machine")
    for column in ("faults", "of the CPU", "bar", "on the clock", "times as fast as time", "memory MB", "bar"):
        table.add_column(column, justify="right")
    for it in figures:
        times = (f"{it.cpu_s:.2f} s", f"{it.bar_s:g} s", f"{it.wall_s:.2f} s", f"{it.times_real:.3g}")
        memory = (f"{it.memory_mb:.0f}", f"{BAR_MEMORY_MB:.0f}")
        table.add_row("ok" if it.ok else "MISSED", it.what, str(it.num_faults), *times, *memory)
    console().print(table)


def _policies(answer: Mapping[str, Any]) -> Table:
    cluster, seeds = answer["cluster"], answer["seeds"]
    gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
    days = answer["duration_s"] / 86400
    title = f"{escape(answer['trace'])}: {gpus} GPUs, {days:.3g} days, jobs {escape(answer['workload'])}, {_seeds(seeds)}"
    table = Table("policy", title=title)
    columns = ("accumulated WAF", f"{answer['reference']} is", "95%", "published", "ETTR", "goodput", "lost GPU-h", "lost $")
    for column in columns:
        table.add_column(column, justify="right")
    for name, it in answer["policies"].items():
        times, low_high = it["unicron_is_times"], it["unicron_is_times_95"]
        between = "-" if low_high is None else f"{low_high[0]:.3f} to {low_high[1]:.3f}"
        published = "-" if it["published"] is None else f"{it['published']:g} x"
        figures = (f"{it['ettr']:.1%}", f"{it['goodput']:.1%}", f"{it['lost_gpu_h']:,.0f}", f"{it['lost_dollars']:,.0f}")
        marked = f"{name} *" if it["fitted"] else name
        table.add_row(
            marked, f"{it['accumulated_waf']:.4g}", "-" if times is None else f"{times:.3f} x", between, published, *figures
        )
    return table


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _jobs(answer: Mapping[str, Any]) -> Table:
    table = Table("job", title=f"The jobs under {answer['reference']}")
    for column in ("accumulated WAF", "ETTR", "goodput", "GPU-h"):
        table.add_column(column, justify="right")
    jobs = answer["policies"][answer["reference"]]["jobs"]
    for name, it in list(jobs.items())[:MOST_JOBS]:
        hours = sum(it.get("gpu_h", {}).values())
        figures = (f"{it.get('ettr', 0.0):.1%}", f"{it.get('goodput', 0.0):.1%}", f"{hours:,.0f}")
        table.add_row(escape(name), f"{it['accumulated_waf']:.4g}", *figures)
    if len(jobs) > MOST_JOBS:
        table.caption = f"and {len(jobs) - MOST_JOBS} more, all in --json"
    return table


def _notes(answer: Mapping[str, Any]) -> list[str]:
    own = answer["policies"][answer["reference"]]
    uses = ", ".join(f"{use} {hours:.3g}" for use, hours in sorted(own["badput_gpu_h"].items(), key=lambda it: -it[1]))
    notes = [f"Badput of {answer['reference']} in GPU-hours: {uses or 'none'}."]
    costly = list(own["costliest_of_first_seed"].items())[:MOST_COSTLY]
    told = (f"{cause} {loss['gpu_s'] / 3600:.3g} GPU-hours, ${loss['dollars']:.0f}" for cause, loss in costly if loss["gpu_s"])
    notes.append(f"What cost {answer['reference']} most on the first seed: {'; '.join(told) or 'nothing'}.")
    notes.append("ETTR and goodput are shares of time, whatever the speed: a slow system can have good ones.")
    if answer["fitted"]:
        notes.append(f"Fitted to the published ratios, so that agreement is no evidence: {', '.join(answer['fitted'])}.")
    fitted = {name: it["fitted"] for name, it in answer["policies"].items() if it["fitted"]}
    notes += [f"* {name}: fitted {', '.join(inputs)}." for name, inputs in fitted.items()]
    return notes


def _below(runs: Sequence[Mapping[str, Any]], reference: str) -> list[str]:
    if not runs:
        return [f"{reference} is above every other policy in each run."]
    told = [f"{reference} is below another policy in {len(runs)} runs:"]
    shown = runs[:MOST_BELOW]
    told += [f"  seed {it['seed']}: {it['policy']} has {it['surplus_flop']:.3g} FLOP more; {it['why']}." for it in shown]
    return told + ([f"  and {len(runs) - len(shown)} more, all in --json."] if len(runs) > len(shown) else [])
