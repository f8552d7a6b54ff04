"""The few shapes that pictures are made of, as lines of an SVG."""

from collections.abc import Sequence
from html import escape

WIDTH, INK, GRID = 960, "#222222", "#d9d9d9"
Point = tuple[float, float]


def document(title: str, height: float, body: Sequence[str]) -> str:
    """A whole picture, as wide as all of them."""
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{_words(title)}</title>", background, *body, "</svg>", ""])


def moved(top: float, body: Sequence[str]) -> list[str]:
    """The shapes of `body`, `top` pixels further down."""
    return [f'<g transform="translate(0 {top:.0f})">', *body, "</g>"]


def rect(x: float, y: float, width: float, height: float, colour: str, *, tip: str = "", opacity: float = 1.0) -> str:
    """A filled box; `tip` shows under the pointer."""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"'
    shape += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return f"{shape}><title>{_words(tip)}</title></rect>" if tip else f"{shape}/>"


def line(x: float, y: float, to_x: float, to_y: float, colour: str = GRID, *, width: float = 1.0) -> str:
    """A straight one."""
    ends = f'x1="{x:.2f}" y1="{y:.2f}" x2="{to_x:.2f}" y2="{to_y:.2f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def curve(points: Sequence[Point], colour: str) -> str:
    """A line through all points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 13) -> str:
    """Words that begin, end or have their middle at `x`."""
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{_words(words)}</text>'


def colour_of(number: int) -> str:
    """Of a curve or a bar: steps of the golden angle, so that neighbours differ, however many there are."""
    return f"hsl({(215 + number * 137.508) % 360:.0f} 62% 45%)"


def _words(text: str) -> str:
    # XML knows no control characters, not even escaped ones
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
