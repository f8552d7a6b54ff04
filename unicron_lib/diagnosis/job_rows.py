"""The rows of a job table, read as a stream: a million of them need the memory of one batch."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

from unicron_lib.diagnosis.job_cells import columns_of
from unicron_lib.errors import UserError

BATCH = 16384
"""Rows that are turned into columns at a time."""

STANDARD_INPUT = Path("-")
MOST_HEADER = 1 << 16
"""Characters of a header at most."""

_STEP = re.compile(r"\d+(?:[_+]\d+)?\.(?:batch|extern|interactive|\d+)")
"""The id of a step of a Slurm job, which is counted with its job."""


class Rows:
    """The rows of one table, in batches of columns.

    After the last batch, `num_broken` counts the rows that had more or fewer cells than the header, and `num_steps` the
    steps of jobs: both were left out.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        """Reads the header. Raises UserError if there is none."""
        line = stream.readline(MOST_HEADER)
        if not line.strip():
            raise UserError(f"{name} is empty: a job table begins with a line that names its columns")
        self._name = name
        self._separator = max(",|;\t", key=line.count)
        self._stream = stream
        self.header = [cell.strip() for cell in next(self._reader([line]))]
        self.places = columns_of(self.header)
        self.num_broken = self.num_steps = 0

    def named(self, ours: str) -> str | None:
        """What the table calls the column that we call `ours`, or None if it has none."""
        return ", ".join(self.header[place] for place in self.places[ours]) if ours in self.places else None

    def batches(self) -> Iterator[Sequence[Sequence[str]]]:
        """The columns of up to `BATCH` rows at a time. Raises UserError for what is no table."""
        rows = self._whole(self._reader(self._stream))
        while batch := list(islice(rows, BATCH)):
            yield list(zip(*batch, strict=True))

    def _reader(self, lines: Iterator[str] | TextIO | list[str]) -> Iterator[list[str]]:
        # sacct -P quotes nothing, and a quote in a job's name is a quote
        is_quoted = self._separator != "|"
        reader = csv.reader(lines, delimiter=self._separator, quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE)
        try:
            yield from reader
        except csv.Error as error:
            raise UserError(f"{self._name} is no table: {error} near row {reader.line_num + 1}") from None

    def _whole(self, rows: Iterator[list[str]]) -> Iterator[list[str]]:
        width = len(self.header)
        place = self.places.get("job_id", (None,))[0]
        for row in rows:
            if len(row) != width:
                self.num_broken += bool(row)
            elif place is not None and "." in row[place] and _STEP.fullmatch(row[place]):
                self.num_steps += 1
            else:
                yield row


@contextmanager
def opened(path: Path) -> Iterator[Rows]:
    """The rows of the table at `path`, "-" for standard input. Raises UserError if it cannot be read."""
    try:
        stream = sys.stdin.buffer if path == STANDARD_INPUT else path.open("rb")
        with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="") as text:
            yield Rows(text, str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
