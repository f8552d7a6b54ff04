"""The figures of a job table as tables, for people."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unicron_lib.diagnosis.characterize import Box, Characterization, Distribution, Share
from unicron_lib.diagnosis.job_failures import Cause

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def show(found: Characterization, screen: Console) -> None:
    """Print all of it."""
    screen.print(_head(found), highlight=False, markup=False, soft_wrap=True)
    screen.print(_shares("Types of jobs", "type", found.types, {box.name: box for box in found.demand}))
    screen.print(_shares("How they ended", "state", found.states, {}))
    for title, rows in (("How long jobs run", found.durations), ("How long they wait before", found.queues)):
        if rows:
            screen.print(_times(title, rows))
    if found.failures.num:
        time = found.failures.gpu_time_s / (found.gpu_time_s or 1.0)
        screen.print(_causes(f"Failures: {found.failures.num}, {time:.1%} of the GPU time", found.failures.reasons))
        if len(found.failures.categories) > 1:
            screen.print(_causes("The same by category", found.failures.categories))
    for told in (*_told("left out", found.left_out), *_told("unreadable cells", found.unreadable)):
        screen.print(told, highlight=False, markup=False, soft_wrap=True)


def _head(found: Characterization) -> str:
    taken = ", ".join(f"{ours} from {theirs}" for ours, theirs in found.columns.items())
    days = found.gpu_time_s / 86400
    return f"{found.num_jobs} jobs, {found.num_gpu_jobs} of them with GPUs: {days:,.1f} GPU days.\nRead: {taken}."


def _told(what: str, counts: Mapping[str, int]) -> list[str]:
    return [f"{what}: {', '.join(f'{count} {why}' for why, count in counts.items())}"] if counts else []


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shares(title: str, first: str, shares: Sequence[Share], boxes: Mapping[str, Box]) -> Table:
    demand = ("GPUs q1 / median / q3", "mean", "whiskers") if boxes else ()
    table = _table(title, first, "jobs", "of all", "GPU hours", "of all", *demand)
    for it in shares:
        numbers = (str(it.num_jobs), f"{it.jobs_share:.1%}", f"{it.gpu_time_s / 3600:,.1f}", f"{it.gpu_time_share:.1%}")
        table.add_row(escape(it.name), *numbers, *_demand(boxes.get(it.name, boxes.get("all"))))
    return table


def _demand(box: Box | None) -> tuple[str, ...]:
    if box is None:
        return ()
    quartiles = f"{box.q1:g} / {box.median:g} / {box.q3:g}"
    return quartiles, f"{box.mean:.1f}", f"{box.whisker_low:g} to {box.whisker_high:g}"


def _times(title: str, rows: Sequence[Distribution]) -> Table:
    table = _table(title, "type", "jobs", "mean", "10%", "median", "90%", "99%", "longest")
    for it in rows:
        times = (it.mean_s, it.p10_s, it.median_s, it.p90_s, it.p99_s, it.max_s)
        table.add_row(escape(it.name), str(it.num_jobs), *map(_time, times))
    return table


def _causes(title: str, causes: Sequence[Cause]) -> Table:
    table = _table(title, "reason", "failures", "GPU time", "GPUs mean / median", "to failure", "restarted", "to restart")
    for it in causes:
        name = it.name if it.category == it.name else f"{it.name} ({it.category})"
        sizes = f"{it.gpus_mean:.0f} / {it.gpus_median:g}"
        failing = _both(it.to_failure_mean_s, it.to_failure_median_s)
        restarting = _both(it.to_restart_mean_s, it.to_restart_median_s)
        counts = (f"{it.num} ({it.num_share:.1%})", f"{it.gpu_time_share:.2%}")
        table.add_row(escape(name), *counts, sizes, failing, str(it.num_restarted), restarting)
    return table


def _both(mean_s: float | None, median_s: float | None) -> str:
    return "-" if mean_s is None or median_s is None else f"{_time(mean_s)} / {_time(median_s)}"


def _time(seconds: float) -> str:
    unit, name = next((it for it in _UNITS if seconds >= it[0]), (1.0, "s"))
    return f"{seconds / unit:.1f} {name}"
