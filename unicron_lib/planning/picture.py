"""A plan as a picture: who has which part of the cluster before and after, as an SVG that any browser shows.

Written by hand: a plotting library would be the largest dependency of the project for two bars.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, MARGIN, BAR_HEIGHT, GAP, ROW = 960, 24, 56, 40, 22
LEGEND_COLUMNS = 3
IDLE, LOST, INK = "#e6e6e6", "#b8b8b8", "#222222"
CHARACTER_WIDTH = 7.5
"""Of a label's letters, in pixels: what a part must be wide for to bear its number."""

Part = tuple[str, int, str]
"""A label, its GPUs, its colour."""


def draw(before: Mapping[str, int], after: Mapping[str, int], *, total_gpus: int, num_gpus: int) -> str:
    """An SVG of two bars of `total_gpus` GPUs each, of which `num_gpus` can be used after.

    `before` and `after` map jobs to GPUs. What neither a job nor a loss takes is idle.
    """
    jobs = sorted({*before, *after})
    colours = {job: _colour(number) for number, job in enumerate(jobs)}
    bars = [
        (f"before: {sum(before.values())} of {total_gpus} GPUs in use", _parts(before, colours, total_gpus, total_gpus)),
        (f"after: {sum(after.values())} of {num_gpus} GPUs in use", _parts(after, colours, num_gpus, total_gpus)),
    ]
    legend = [(job, f"{job}  {before.get(job, 0)} → {after.get(job, 0)}", colours[job]) for job in jobs]
    rows = -(-len(legend) // LEGEND_COLUMNS)
    height = 2 * (BAR_HEIGHT + GAP) + rows * ROW + 2 * MARGIN
    body = [line for number, (title, parts) in enumerate(bars) for line in _bar(title, parts, total_gpus, number)]
    body += _legend([(label, colour) for _, label, colour in legend])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    title = "<title>GPUs of each job before and after the plan</title>"
    return "\n".join([head, title, background, *body, "</svg>", ""])


def _colour(number: int) -> str:
    # steps of the golden angle: neighbours differ, however many there are
    return f"hsl({number * 137.508 % 360:.0f} 62% {66 + 12 * (number % 2)}%)"


def _parts(gpus: Mapping[str, int], colours: Mapping[str, str], num_gpus: int, total_gpus: int) -> list[Part]:
    parts = [(job, count, colours[job]) for job, count in sorted(gpus.items())]
    idle = max(0, num_gpus - sum(gpus.values()))
    return [part for part in (*parts, ("idle", idle, IDLE), ("lost", total_gpus - num_gpus, LOST)) if part[1]]


def _bar(title: str, parts: Sequence[Part], total_gpus: int, number: int) -> Iterator[str]:
    top = MARGIN + number * (BAR_HEIGHT + GAP)
    yield _text(MARGIN, top + 12, title)
    scale = (WIDTH - 2 * MARGIN) / max(1, total_gpus)
    left = float(MARGIN)
    for label, count, colour in parts:
        width = count * scale
        tooltip = f"<title>{escape(label)}: {count} GPUs</title>"
        size = f'width="{width:.2f}" height="{BAR_HEIGHT - 18}"'
        yield f'<rect x="{left:.2f}" y="{top + 18}" {size} fill="{colour}" stroke="#ffffff">{tooltip}</rect>'
        shown = next((text for text in (f"{label} {count}", str(count)) if len(text) * CHARACTER_WIDTH < width), "")
        if shown:
            yield _text(left + width / 2, top + 42, shown, anchor="middle")
        left += width


def _legend(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    top = MARGIN + 2 * (BAR_HEIGHT + GAP)
    for number, (label, colour) in enumerate(entries):
        x = MARGIN + number % LEGEND_COLUMNS * (WIDTH - 2 * MARGIN) / LEGEND_COLUMNS
        y = top + number // LEGEND_COLUMNS * ROW
        yield f'<rect x="{x:.2f}" y="{y}" width="14" height="14" fill="{colour}"/>'
        yield _text(x + 20, y + 12, label)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y}" fill="{INK}" text-anchor="{anchor}">{escape(text)}</text>'
