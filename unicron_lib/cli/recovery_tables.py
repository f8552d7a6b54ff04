"""The figures of `unicron bench recovery` as tables, for people, and as an object."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from unicron_lib.cli.options import console
from unicron_lib.cli.recovery_figures import Bar, Recovery
from unicron_lib.local.outages import FAULTS, Fault


def show_recovery(recoveries: Sequence[Recovery], held: Sequence[Bar], against: str) -> None:
    """All faults and systems, then the bars; ratios are to the system `against`."""
    table = Table("fault", "system", title="What a failure costs: medians (least-most), in seconds")
    columns = ("n", "seen", "without progress", "ratio", "without new work", "iterations", "micro-batches")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=column not in {"iterations", "micro-batches"})
    for it in sorted(recoveries, key=lambda it: list(Fault).index(it.fault)):
        table.add_row(FAULTS[it.fault], it.system, *_row(it, recoveries, against))
    console().print(table)
    console().print(
        "Without progress: until the first complete iteration; without new work: until one that had not been complete before. "
        "Iterations and micro-batches, of ranks that went on, are those that were complete and done again. "
        f"The ratio tells how many times as long {against} takes. When a node joins: how much longer the longest iteration was."
    )
    _show_bars(held)


def _row(it: Recovery, recoveries: Sequence[Recovery], against: str) -> tuple[str, ...]:
    other = next((found for found in recoveries if (found.system, found.fault) == (against, it.fault)), None)
    ratio = f"{other.stalled_s / it.stalled_s:.1f} x" if other and it.stalled_s > 0 else "-"
    seen = [outage.detection_s for outage in it.outages if outage.detection_s is not None]
    lost = [outage.lost_micro_batches for outage in it.outages if outage.lost_micro_batches is not None]
    return (
        str(len(it.outages)),
        f"{median(seen):.2f}" if seen else "-",
        _spread([outage.stalled_s for outage in it.outages], digits=2),
        ratio,
        _spread([outage.regained_s for outage in it.outages], digits=2),
        "-" if it.fault is Fault.GROWTH else f"{it.again:g}",
        _spread(lost, digits=0),
    )


def _spread(values: Sequence[float], *, digits: int) -> str:
    if not values:
        return "-"
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def _show_bars(held: Sequence[Bar]) -> None:
    if not held:
        return
    table = Table("", "what was promised", title="Bars")
    table.add_column("found", justify="right")
    table.add_column("bar", justify="right")
    for bar in held:
        found = "not measured" if bar.found is None else f"{bar.found:.3g} {bar.unit}".strip()
        wanted = f"{'at least' if bar.at_least else 'at most'} {bar.bar:g} {bar.unit}".strip()
        table.add_row("ok" if bar.ok else "MISSED", bar.what, found, wanted)
    console().print(table)


def recovery_object(recoveries: Sequence[Recovery], held: Sequence[Bar], notes: Sequence[str]) -> dict[str, Any]:
    """The object of `--json`."""
    return {
        "ok": all(bar.ok for bar in held),
        "recoveries": [asdict(it) | {"stalled_s": it.stalled_s, "again": it.again} for it in recoveries],
        "bars": [asdict(bar) | {"ok": bar.ok} for bar in held],
        "notes": list(notes),
    }
