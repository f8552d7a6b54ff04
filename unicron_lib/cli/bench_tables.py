"""The figures of the benches as tables, for people."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from unicron_lib.cli.detection_figures import Latency
from unicron_lib.cli.diagnosis_figures import BAR_MEMORY_MB, Reading
from unicron_lib.cli.options import console
from unicron_lib.cli.overhead_figures import Overhead, Spread
from unicron_lib.cli.planner_figures import Figure
from unicron_lib.detection.trial import Verdict


def show_planner(figures: Sequence[Figure]) -> None:
    """The planner's times."""
    table = Table("", "what", title="The planner on this machine")
    _right(table, "median", "worst", "of the CPU", "bar")
    table.add_column("side by side")
    for figure in figures:
        times = (_time(seconds) for seconds in (figure.median_s, figure.worst_s, figure.cpu_s, figure.bar_s))
        table.add_row(_verdict(ok=figure.ok), figure.what, *times, _beside(figure))
    console().print(table)


def show_diagnosis(readings: Sequence[Reading]) -> None:
    """How logs are read."""
    table = Table("", "a log is", title="Diagnosis on this machine")
    _right(table, "MB", "MB/s of one core", "bar", "seconds", "memory MB", "bar")
    for it in readings:
        speed, memory = (f"{it.mb_per_s:.0f}", f"{it.bar_mb_per_s:.0f}"), (f"{it.memory_mb:.0f}", f"{BAR_MEMORY_MB:.0f}")
        table.add_row(_verdict(ok=it.ok), it.what, f"{it.size_mb:.0f}", *speed, f"{it.wall_s:.2f}", *memory)
    console().print(table)


def show_detection(latencies: Sequence[Latency], verdicts: Mapping[str, Verdict]) -> None:
    """Latencies of detection, and what the detectors made of simulated days."""
    table = Table("", "from the fault to the observation", title="Detection on this machine")
    _right(table, "n", "median", "95%", "bar", "the paper's (recalled, not checked)")
    for it in latencies:
        row = (_amount(value, it.unit) for value in (it.median, it.p95, it.bar, it.paper))
        table.add_row(_verdict(ok=it.ok), it.what, str(len(it.samples)), *row)
    console().print(table)
    _show_trials(verdicts)


def _show_trials(verdicts: Mapping[str, Verdict]) -> None:
    table = Table("", "iterations", title="Simulated training, hangs and stragglers at random moments")
    _right(table, "hours", "hangs found", "stragglers found", "false alarms", "precision", "recall", "latest hang", "its bar")
    for name, it in verdicts.items():
        found = (f"{it.hangs_found} of {it.hangs}", f"{it.stragglers_found} of {it.stragglers}", str(it.false_alarms))
        rates = (f"{it.precision:.1%}", f"{it.recall:.1%}", f"{it.latest_hang:.1f} x D_iter", f"{it.hang_bar:.1f} x")
        table.add_row(_verdict(ok=it.ok), name, f"{it.hours:.1f}", *found, *rates)
        spinning = f"{it.spinning_found} of {it.spinning}", "", "", "", "", f"{it.latest_spinning:.1f} x D_iter", ""
        table.add_row("", "  of these, spinning", "", *spinning)
    console().print(table)
    console().print(
        "A rank that stands still is told from one in a long iteration: it uses no processor. One that spins is not, and is "
        "waited for as long as iterations may take by their scatter; the bar is for those that stand still."
    )


def show_overhead(found: Overhead) -> None:
    """What monitoring costs."""
    table = Table(
        "", "cost of monitoring", title=f"An iteration of {_time(found.iteration_s)}, {found.num_pairs} pairs of blocks"
    )
    _right(table, "median", "95% interval", "an iteration", "bar")
    parts = (
        ("processor time that the rank itself spends on it", found.telling, found.busy_s),
        ("with it against without it, on the clock", found.wall, found.iteration_s),
        ("with it against without it, processor time", found.thread, found.busy_s),
    )
    for what, spread, whole_s in parts:
        row = (f"{spread.median:+.3%}", _interval(spread), _time(spread.median * whole_s), f"{found.bar:.1%}")
        table.add_row(spread.against(found.bar), what, *row)
    console().print(table)
    console().print(f"the agent and its probes: {found.agent_cores:.2%} of one core")
    console().print(found.summary)


def _interval(spread: Spread) -> str:
    return f"{spread.low:+.3%} to {spread.high:+.3%}"


def _right(table: Table, *columns: str) -> None:
    for column in columns:
        table.add_column(column, justify="right")


def _verdict(*, ok: bool) -> str:
    return "ok" if ok else "MISSED"


def _beside(figure: Figure) -> str:
    wrong = "" if figure.is_right and figure.gap == 0.0 else f"WRONG ANSWER or a gap ({figure.gap:.1e}). "
    return wrong + (f"{figure.ratio:.3g} x the speed of {figure.against}" if figure.ratio else "")


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return _time(value) if unit == "s" else f"{value:.0f} {unit}"


def _time(seconds: float) -> str:
    units = ((1.0, 1.0, "s", 2), (1e-4, 1e-3, "ms", 1), (0.0, 1e-6, "us", 1))
    _, unit, name, digits = next(it for it in units if abs(seconds) >= it[0])
    return f"{seconds / unit:.{digits}f} {name}"
