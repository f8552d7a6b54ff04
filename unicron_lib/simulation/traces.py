"""Traces of faults as files: our own format, CSV or JSON.

A CSV trace has three lines of head and one line a fault, in the order of time. Only `at_s`, `kind` and `node` are needed:

    # name: heat wave
    # source: made up
    # duration_s: 604800
    at_s,kind,node,rank_share,repair_s
    3600,ecc_error,7,0.25,86400
    7200,nccl_timeout,0,0,0

`at_s` and `repair_s` are seconds, `node` counts from 0, `rank_share` (0.0 to below 1.0) tells which of the node's GPUs it
is, `kind` is an `ErrorKind`. The JSON of the same trace is one object with `name`, `source`, `duration_s` and `faults`, a
list of objects with the columns' names. The traces of others are read by `trace_readers`.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation.faults import Fault, Trace

COLUMNS = tuple(field.name for field in fields(Fault))
NEEDED = ("at_s", "kind", "node")
HEAD = ("name", "source", "duration_s")


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError if it cannot be read or is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: byte {error.start} is no UTF-8") from error


def read_json(path: Path, text: str) -> Any:
    """The value that the JSON text of `path` holds. Raises UserError if it is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from error


def read(path: Path) -> Trace:
    """The trace in a CSV or JSON file of our format. Raises UserError with one sentence that names the line or the fault."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty")
    return _from_json(path, text) if text.lstrip().startswith(("{", "[")) else _from_csv(path, text)


def to_csv(trace: Trace) -> str:
    """The text of its CSV file."""
    text = io.StringIO()
    for key in HEAD:
        text.write(f"# {key}: {_one_line(getattr(trace, key))}\n")
    rows = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    rows.writeheader()
    rows.writerows(asdict(fault) for fault in trace.faults)
    return text.getvalue()


def to_json(trace: Trace) -> str:
    """The text of its JSON file."""
    return json.dumps(asdict(trace), indent=1) + "\n"


def write(trace: Trace, path: Path) -> None:
    """Write it to a file that ends in .json or .csv. Raises UserError for another ending."""
    writers = {".csv": to_csv, ".json": to_json}
    if path.suffix not in writers:
        raise UserError(f"{path} must end in .csv or .json")
    path.write_text(writers[path.suffix](trace))


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _from_json(path: Path, text: str) -> Trace:
    value = read_json(path, text)
    if not isinstance(value, dict) or not isinstance(value.get("faults"), list):
        raise UserError(f"{path} must hold one object with name, source, duration_s and a list of faults")
    rows = ((f"fault {number}", row) for number, row in enumerate(value["faults"], start=1))
    return _trace(path, value, rows)


def _from_csv(path: Path, text: str) -> Trace:
    lines = text.splitlines()
    num_head = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    head = {}
    for line in lines[:num_head]:
        key, _, value = line.lstrip("# ").partition(":")
        head[key.strip()] = value.strip()
    rows = csv.DictReader(lines[num_head:], restkey="", strict=True)
    columns = rows.fieldnames or ()
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UserError(f"{path} has no column {missing[0]}: its columns are {', '.join(columns) or 'none'}")
    numbered = ((f"line {num_head + rows.line_num}", row) for row in _rows(path, rows))
    return _trace(path, head, numbered)


def _rows(path: Path, rows: "csv.DictReader[str]") -> Iterator[dict[str, Any]]:
    try:
        for row in rows:
            yield {name: cell for name, cell in row.items() if cell}
    except csv.Error as error:
        raise UserError(f"{path} is no CSV: {error}") from error


def _trace(path: Path, head: Mapping[str, Any], rows: Iterator[tuple[str, Any]]) -> Trace:
    if "duration_s" not in head:
        raise UserError(f"{path} does not tell its duration_s, the seconds from its start to its end")
    faults = tuple(_fault(path, where, row) for where, row in rows)
    try:
        return Trace(
            name=str(head.get("name") or path.stem),
            source=str(head.get("source") or path.name),
            duration_s=float(head["duration_s"]),
            faults=faults,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _fault(path: Path, where: str, row: Any) -> Fault:
    if not isinstance(row, dict):
        raise UserError(f"{path}, {where}: a fault must be an object, this is {str(row)[:60]!r}")
    unknown = [name for name in row if name not in COLUMNS]
    missing = [name for name in NEEDED if name not in row]
    if missing:
        raise UserError(f"{path}, {where}: the fault has no {missing[0]}")
    if unknown:
        raise UserError(
            f"{path}, {where}: the fault has {unknown[0] or 'more cells than the header'}, it may have {', '.join(COLUMNS)}"
        )
    try:
        return Fault(
            at_s=float(row["at_s"]),
            kind=ErrorKind(row["kind"]),
            node=int(row["node"]),
            rank_share=float(row.get("rank_share", 0.0)),
            repair_s=float(row.get("repair_s", 0.0)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}, {where}: {error}") from error
