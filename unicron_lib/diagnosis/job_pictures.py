"""The figures of a job table as SVGs that any browser shows, drawn by hand: bars, curves and boxes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from unicron_lib.diagnosis.characterize import POINTS_S, Box, Characterization, Distribution

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 820, 420, 90, 48, 190, 56
ROW, LABELS = 34, 210
INK, GRID, COLOURS = "#222222", "#dddddd", ("#3b6fb5", "#e08a2e")
TIMES = (
    (1.0, "1 s"),
    (10.0, "10 s"),
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (36000.0, "10 h"),
    (864000.0, "10 d"),
)

Marks = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of shares (0 to 1) over positive places."""

    name: str
    places: Sequence[float]
    shares: Sequence[float]


def pictures(found: Characterization) -> dict[str, str]:
    """Names of files, and the SVG that each is to hold; a figure that the table has no data for is left out."""
    legend = ("share of the jobs", "share of the GPU time")
    types = [(it.name, (it.jobs_share, it.gpu_time_share)) for it in found.types]
    states = [(it.name, (it.jobs_share, it.gpu_time_share)) for it in found.states]
    reasons = [(it.name, (it.num_share, it.gpu_time_share)) for it in found.failures.reasons]
    sizes = [
        Curve(name="jobs", places=found.sizes.gpus, shares=found.sizes.jobs_shares),
        Curve(name="GPU time", places=found.sizes.gpus, shares=found.sizes.gpu_time_shares),
    ]
    drawn = {
        "types.svg": _bars("Types of jobs", legend, types),
        "states.svg": _bars("How jobs ended", legend, states),
        "durations.svg": _curves("How long jobs run", _of_times(found.durations), TIMES),
        "queues.svg": _curves("How long jobs wait", _of_times(found.queues), TIMES),
        "gpus.svg": _curves("GPUs of a job, at most", sizes, _powers(found.sizes.gpus[-1])),
        "demand.svg": _boxes("GPUs that jobs ask for", found.demand),
    }
    if reasons:
        drawn["failures.svg"] = _bars("Why jobs failed", ("share of the failures", "share of their GPU time"), reasons)
    return {name: text for name, text in drawn.items() if text}


def _of_times(rows: Sequence[Distribution]) -> list[Curve]:
    return [Curve(name=it.name, places=POINTS_S, shares=it.shares) for it in rows]


def _powers(greatest: float) -> Marks:
    return [(float(4**power), str(4**power)) for power in range(1 + math.ceil(math.log(max(greatest, 4), 4)))]


def _bars(title: str, legend: tuple[str, str], rows: Sequence[tuple[str, tuple[float, float]]]) -> str:
    height = TOP + ROW * len(rows) + BOTTOM
    scale = WIDTH - LABELS - 90
    body = [_text(LABELS, 20, title, size=16)]
    for place, (name, colour) in enumerate(zip(legend, COLOURS, strict=True)):
        x = LABELS + 220 * place
        body += [_rect(x, height - 30, 14, 14, colour), _text(x + 20, height - 18, name)]
    for row, (name, values) in enumerate(rows):
        y = TOP + ROW * row
        body.append(_text(LABELS - 8, y + 18, _short(name, 28), anchor="end"))
        for place, (value, colour) in enumerate(zip(values, COLOURS, strict=True)):
            body.append(_rect(LABELS, y + 13 * place, value * scale, 12, colour))
            body.append(_text(LABELS + value * scale + 5, y + 13 * place + 10, f"{value:.1%}", size=11))
    return _svg(title, height, body)


def _curves(title: str, curves: Sequence[Curve], marks: Marks) -> str:
    """Shares over a logarithmic axis with `marks`; empty if there are no curves."""
    if not curves:
        return ""
    low = min(marks[0][0], *(curve.places[0] for curve in curves))
    high = max(marks[-1][0], *(curve.places[-1] for curve in curves))
    body = [_text(LEFT, 24, title, size=16), *_share_axis()]
    for place, name in marks:
        x = _across(place, low, high)
        body += [_line(x, TOP, x, HEIGHT - BOTTOM), _text(x, HEIGHT - BOTTOM + 20, name, anchor="middle")]
    for number, curve in enumerate(curves):
        colour = _colour(number)
        points = zip(curve.places, curve.shares, strict=True)
        path = " ".join(f"{_across(place, low, high):.1f},{_up(share):.1f}" for place, share in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 20 * number
        body += [_rect(WIDTH - RIGHT + 16, y, 14, 14, colour), _text(WIDTH - RIGHT + 36, y + 12, _short(curve.name, 20))]
    return _svg(title, max(HEIGHT, TOP + 20 * len(curves)), body)


def _boxes(title: str, boxes: Sequence[Box]) -> str:
    height = TOP + ROW * len(boxes) + BOTTOM
    low, high = 1.0, max(4.0, *(box.whisker_high for box in boxes))
    body = [_text(LABELS, 24, title, size=16)]
    for place, name in _powers(high):
        x = _beside(place, low, high)
        body += [_line(x, TOP - 8, x, height - BOTTOM), _text(x, height - BOTTOM + 20, name, anchor="middle")]
    for row, box in enumerate(boxes):
        y = TOP + ROW * row
        ends = (box.whisker_low, box.q1, box.median, box.q3, box.whisker_high)
        least, q1, median, q3, most = (_beside(max(value, low), low, high) for value in ends)
        body += [
            _text(LABELS - 8, y + 15, _short(box.name, 28), anchor="end"),
            _line(least, y + 10, most, y + 10, INK),
            _rect(q1, y + 2, max(q3 - q1, 2.0), 16, _colour(row)),
            _line(median, y, median, y + 20, INK),
        ]
    return _svg(title, height, body)


def _share_axis() -> Iterator[str]:
    for step in range(5):
        y = _up(step / 4)
        yield _line(LEFT, y, WIDTH - RIGHT, y)
        yield _text(LEFT - 8, y + 4, f"{step * 25}%", anchor="end")


def _across(place: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(place / low) / math.log(high / low)


def _beside(place: float, low: float, high: float) -> float:
    top = 4 ** math.ceil(math.log(high, 4))
    return LABELS + (WIDTH - LABELS - 40) * math.log(place / low) / math.log(top / low)


def _up(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _colour(number: int) -> str:
    # steps of the golden angle: neighbours differ, however many there are
    return f"hsl({(215 + number * 137.508) % 360:.0f} 60% 50%)"


def _short(text: str, most: int) -> str:
    # XML knows no control characters, not even escaped ones
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable if len(printable) <= most else f"{printable[: most - 1]}…"


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *body, "</svg>", ""])


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str = GRID) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} fill="{INK}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
