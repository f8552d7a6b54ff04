"""A table with what must be known to read it, as Markdown and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Cell = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`name` is a file's, `picture` that of an SVG beside it, if any.

    `notes` are sentences: sources, what is fitted, what is not reproduced and why.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    picture: str = ""

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def as_markdown(self) -> str:
        """A section with a table of it."""
        lines = [self.columns, ("---",) * len(self.columns), *(tuple(shown(cell) for cell in row) for row in self.rows)]
        table = [f"| {' | '.join(line)} |" for line in lines]
        notes = [f"- {note}" for note in self.notes]
        picture = [f"![{self.title}]({self.picture})", ""] if self.picture else []
        return "\n".join([f"## {self.title}", "", *picture, *table, *([""] if notes else []), *notes, ""])


def shown(cell: Cell) -> str:
    """A number with up to five digits; "-" for what there is not."""
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:.5g}" if abs(cell) < 1e4 or abs(cell) >= 1e7 else f"{cell:.0f}"
        case _:
            return str(cell)


def document(title: str, introduction: str, tables: Sequence[Table]) -> str:
    """A page of all tables."""
    return "\n".join([f"# {title}", "", introduction, "", *(table.as_markdown() for table in tables)])
