"""Pictures of a comparison: WAF over time, ratios, and who held which GPUs when. Written by hand as SVG."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil

from unicron_lib.simulation import svg
from unicron_lib.simulation.accounting import curve
from unicron_lib.simulation.baselines import PAPER
from unicron_lib.simulation.closed_forms import DAY_S
from unicron_lib.simulation.comparison import Comparison
from unicron_lib.simulation.engine import Outcome
from unicron_lib.simulation.ledger import NOBODY, Segment
from unicron_lib.simulation.uses import Use

LEFT, RIGHT, TOP, GAP = 150, 30, 40, 30
PLOT = svg.WIDTH - LEFT - RIGHT
CURVES_HEIGHT, ROW, LEGEND_COLUMNS = 260, 24, 5
EXACT_POINTS = 3000
"""A curve of more turns is drawn as the mean of each pixel."""
MOST_CURVES, MOST_ROWS = 6, 64
GRAVE, LIGHT, AT_WORK, STANDING = "#c62828", "#9e9e9e", "#4f8fcf", "#e07b39"


def draw(found: Comparison) -> str:
    """The three pictures below each other, in one SVG; curves and the Gantt chart are those of the first seed."""
    own = found.results[found.reference].first
    parts = [_curves(found, own), _bars(found), _gantt(own)]
    body, top = [], 0.0
    for height, shapes in parts:
        body += svg.moved(top, shapes)
        top += height + GAP
    return svg.document(f"{found.trace}, {found.cluster.num_gpus} GPUs, {len(found.jobs)} jobs", top, body)


Part = tuple[float, list[str]]


def _curves(found: Comparison, own: Outcome) -> Part:
    """WAF over time by policy; below the axis a mark for each fault, longer and red where a node is lost."""
    lines = {name: _of_time(found.results[name].first) for name in drawn(found)}
    colours = _colours(found)
    most = max((y for points in lines.values() for _, y in points), default=0.0) or 1.0
    floor = TOP + CURVES_HEIGHT
    shapes = [svg.text(LEFT, TOP - 18, "WAF over time (weighted FLOP/s)", size=15)]
    for step in range(5):
        y = floor - CURVES_HEIGHT * step / 4
        shapes += [svg.line(LEFT, y, svg.WIDTH - RIGHT, y), svg.text(LEFT - 8, y + 4, f"{most * step / 4:.3g}", anchor="end")]
    for name, points in reversed(lines.items()):  # the reference is drawn last, over the others
        placed = [(LEFT + x * PLOT, floor - y / most * CURVES_HEIGHT) for x, y in points]
        shapes.append(svg.curve(placed, colours[name]))
    shapes += _marks(own, floor)
    shapes += _days(own.duration_s, floor + 34)
    shapes += _legend({name: colours[name] for name in lines}, floor + 60)
    return floor + 60 + ceil(len(lines) / LEGEND_COLUMNS) * ROW, shapes


def drawn(found: Comparison) -> list[str]:
    """Whose curves are drawn: all, or of many the reference and those of the paper, else nobody can tell them apart."""
    names = list(found.results)
    if len(names) <= MOST_CURVES:
        return names
    chosen = [found.reference, *(name for name in PAPER if name in names)]
    return [*chosen, *(name for name in names if name not in chosen)][: len(PAPER) + 1]


def _colours(found: Comparison) -> dict[str, str]:
    return {name: svg.colour_of(number) for number, name in enumerate(found.results)}


def _of_time(outcome: Outcome) -> list[svg.Point]:
    """The curve as steps, or as means of pixels if it has too many; x from 0 to 1."""
    turns = curve(outcome.segments, {job.job: job.weight for job in outcome.jobs})
    end_s = outcome.duration_s
    if len(turns) <= EXACT_POINTS:
        levels = [(0.0, 0.0), *turns]
        corners = [((at_s, before), (at_s, after)) for (_, before), (at_s, after) in zip(levels, turns, strict=False)]
        return [(at_s / end_s, level) for pair in corners for at_s, level in pair]
    return _means(turns, end_s)


def _means(turns: Sequence[tuple[float, float]], end_s: float) -> list[svg.Point]:
    times = [at_s for at_s, _ in turns]
    edges = [end_s * pixel / PLOT for pixel in range(PLOT + 1)]
    points = []
    for since, until in pairwise(edges):
        first, last = bisect_right(times, since), bisect_right(times, until)
        stops = [since, *times[first:last], until]
        levels = [turns[index - 1][1] if index else 0.0 for index in range(first, last + 1)]
        area = sum(level * (b - a) for level, (a, b) in zip(levels, pairwise(stops), strict=True))
        points.append(((since + until) / 2 / end_s, area / (until - since)))
    return points


def _marks(outcome: Outcome, floor: float) -> Iterator[str]:
    """One mark a pixel is enough; lost nodes are drawn over the rest."""
    places = {(fault.takes_node, round(LEFT + fault.at_s / outcome.duration_s * PLOT)) for fault in outcome.faults.values()}
    for is_grave, x in sorted(places):
        yield svg.line(x, floor + 3, x, floor + (18 if is_grave else 10), GRAVE if is_grave else LIGHT)


def _days(duration_s: float, y: float) -> Iterator[str]:
    days = duration_s / DAY_S
    for step in range(5):
        yield svg.text(LEFT + PLOT * step / 4, y, f"day {days * step / 4:.3g}", anchor="middle")


def _legend(colours: Mapping[str, str], top: float) -> Iterator[str]:
    wide = (svg.WIDTH - 2 * RIGHT) / LEGEND_COLUMNS
    for number, (name, colour) in enumerate(colours.items()):
        x, y = RIGHT + number % LEGEND_COLUMNS * wide, top + number // LEGEND_COLUMNS * ROW
        yield svg.rect(x, y, 14, 14, colour)
        yield svg.text(x + 20, y + 12, name, size=12)


def _bars(found: Comparison) -> Part:
    """How many times a policy's WAF the reference has, with the interval over seeds, and a mark at what is published."""
    means = {name: times for name in found.results if (times := found.times(name))}
    published = {name: value for name, value in found.published.items() if name in means}
    most = max([1.0, *(it.high or it.mean for it in means.values()), *published.values()])
    title = f"Times the accumulated WAF of a policy that {found.reference} has (whisker: 95% interval, red: published)"
    shapes = [svg.text(LEFT, TOP - 18, title, size=15)]
    scale = (PLOT - 70) / most
    colours = _colours(found)
    for number, (name, it) in enumerate(means.items()):
        y = TOP + number * ROW
        shapes += [svg.text(LEFT - 8, y + 14, name[:22], anchor="end", size=12)]
        shapes += [svg.rect(LEFT, y + 2, it.mean * scale, ROW - 8, colours[name], tip=f"{name}: {it.mean:.4g}")]
        if it.low is not None and it.high is not None:
            shapes += [svg.line(LEFT + it.low * scale, y + 10, LEFT + it.high * scale, y + 10, svg.INK, width=2)]
        if name in published:
            x = LEFT + published[name] * scale
            shapes += [svg.line(x, y - 1, x, y + ROW - 3, GRAVE, width=2)]
        shapes += [svg.text(LEFT + (it.high or it.mean) * scale + 8, y + 14, f"{it.mean:.3f}", size=12)]
    return TOP + len(means) * ROW, shapes


def _gantt(outcome: Outcome) -> Part:
    """A row a job: as high as its GPUs of the most that it ever held, blue while it trains, orange while it does not.

    Of more jobs than `MOST_ROWS` the first ones are drawn.
    """
    jobs = [job.job for job in outcome.jobs][:MOST_ROWS]
    most = {job: max((s.gpus for s in outcome.segments if s.job == job), default=0) for job in jobs}
    title = f"GPUs of each job under {outcome.policy} (blue: training, orange: not; in brackets the most it held)"
    shapes = [svg.text(LEFT, TOP - 18, title, size=15)]
    for number, job in enumerate(jobs):
        y = TOP + number * ROW
        shapes += [svg.text(LEFT - 8, y + 15, f"{job[:16]} ({most[job]})", anchor="end", size=12)]
        shapes += [svg.line(LEFT, y + ROW - 3, svg.WIDTH - RIGHT, y + ROW - 3)]
    rows = {job: number for number, job in enumerate(jobs)}
    shapes += _held(outcome, rows, most)
    lost = TOP + len(jobs) * ROW
    shapes += [svg.text(LEFT - 8, lost + 15, "nodes away", anchor="end", size=12)]
    away = [segment for segment in outcome.segments if segment.job == NOBODY]
    shapes += _away(away, outcome.duration_s, lost)
    return lost + 2 * ROW + 10, [*shapes, *_days(outcome.duration_s, lost + ROW + 18)]


def _held(outcome: Outcome, rows: Mapping[str, int], most: Mapping[str, int]) -> Iterator[str]:
    """What is too short for half a pixel is drawn as half a pixel, once a place."""
    placed = set()
    for segment in sorted(outcome.segments, key=lambda segment: segment.use is not Use.TRAINING):
        if segment.job not in rows or not segment.gpus:
            continue
        x, wide = _across(segment, outcome.duration_s)
        is_training = segment.use is Use.TRAINING
        place = (segment.job, round(x * 2), round(wide * 2), segment.gpus if wide > 1 else 0, is_training)
        if place not in placed:
            placed.add(place)
            high = (ROW - 5) * segment.gpus / most[segment.job]
            y = TOP + (rows[segment.job] + 1) * ROW - 3 - high
            tip = f"{segment.job}: {segment.gpus} GPUs, {segment.use}" if wide > 1 else ""
            yield svg.rect(x, y, wide, high, AT_WORK if is_training else STANDING, tip=tip)


def _away(segments: Sequence[Segment], duration_s: float, top: float) -> Iterator[str]:
    for x, wide in sorted({_across(segment, duration_s) for segment in segments}):
        yield svg.rect(x, top + 4, wide, ROW - 8, GRAVE, opacity=0.35)


def _across(segment: Segment, duration_s: float) -> tuple[float, float]:
    x = LEFT + PLOT * segment.from_s / duration_s
    return x, max(0.5, PLOT * segment.duration_s / duration_s)
