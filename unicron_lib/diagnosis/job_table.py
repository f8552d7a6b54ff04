"""A job table in memory: one array a column, 80 bytes a job."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unicron_lib.diagnosis import job_cells
from unicron_lib.diagnosis.job_rows import Rows, opened
from unicron_lib.errors import UserError

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]
Columns = Sequence[Sequence[str]]

NUMBERS: Mapping[str, Callable[[str], float]] = {
    "gpus": job_cells.gpus,
    "duration_s": job_cells.seconds,
    "queue_s": job_cells.seconds,
    "submitted_at": job_cells.moment,
    "started_at": job_cells.moment,
    "ended_at": job_cells.moment,
    "failed_at": job_cells.moment,
    "restarted_at": job_cells.moment,
}
NO_THREAD = 0
_ARRAY_TASK = re.compile(r"\d+_\d+")
TEXTS = ("type", "state", "reason", "category")
ESSENTIAL = {
    "gpus": "the number of GPUs (gpu_num, AllocTRES, nvidia.com/gpu)",
    "duration_s": "how long jobs ran (duration, Elapsed, or start_time and end_time)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """A text a job: `names[codes[i]]`. The empty name stands for no text."""

    codes: Codes
    names: tuple[str, ...]

    def mapped(self, new_name: Callable[[str], str]) -> "Labels":
        """The same jobs under `new_name(name)`."""
        index: dict[str, int] = {}
        codes = np.array([index.setdefault(new_name(name), len(index)) for name in self.names], dtype=np.int32)
        return Labels(codes=codes[self.codes], names=tuple(index))

    @classmethod
    def paired(cls, first: "Labels", second: "Labels") -> "Labels":
        """Both names of a job as one, with a zero byte between them."""
        codes, inverse = np.unique(first.codes.astype(np.int64) * len(second.names) + second.codes, return_inverse=True)
        pairs = (divmod(code, len(second.names)) for code in codes.tolist())
        names = tuple(f"{first.names[one]}\0{second.names[other]}" for one, other in pairs)
        return cls(codes=inverse.astype(np.int32), names=names)

    def where(self, mask: NDArray[np.bool_]) -> "Labels":
        """Those of the jobs in `mask`."""
        return Labels(codes=self.codes[mask], names=self.names)

    def folded(self, weights: Floats, most: int) -> "Labels":
        """The `most` names of the greatest summed weight, in that order, and what else there is as "(N others)"."""
        total = np.bincount(self.codes, weights=weights, minlength=len(self.names))
        counts = np.bincount(self.codes, minlength=len(self.names))
        order = sorted(range(len(self.names)), key=lambda code: (-total[code], -counts[code], self.names[code]))
        kept = [code for code in order if counts[code]]
        others = f"({len(kept) - most} others)"
        place = np.zeros(len(self.names), dtype=np.int32)
        place[kept] = np.minimum(np.arange(len(kept)), most)
        names = [self.names[code] for code in kept[:most]] + ([others] if len(kept) > most else [])
        return Labels(codes=place[self.codes], names=tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """The jobs of a table. Times in seconds and epoch seconds, NaN where the table does not tell.

    `thread` is the same for the runs of one job: those with one user and name, else with one id, else `NO_THREAD`; the
    tasks of a job array are no runs of one job. `columns` tells which
    column of the file was taken for what, `left_out` and `unreadable` what could not be used, both by reason.
    """

    gpus: Floats
    duration_s: Floats
    queue_s: Floats
    started_at: Floats
    ended_at: Floats
    failed_at: Floats
    restarted_at: Floats
    thread: NDArray[np.int64]
    types: Labels
    states: Labels
    reasons: Labels
    categories: Labels
    columns: Mapping[str, str]
    left_out: Mapping[str, int]
    unreadable: Mapping[str, int]

    def where(self, mask: NDArray[np.bool_]) -> "JobTable":
        """The jobs in `mask`."""
        if mask.all():
            return self
        arrays = ("gpus", "duration_s", "queue_s", "started_at", "ended_at", "failed_at", "restarted_at", "thread")
        labels = ("types", "states", "reasons", "categories")
        parts: dict[str, Any] = {name: getattr(self, name)[mask] for name in arrays}
        parts |= {name: getattr(self, name).where(mask) for name in labels}
        return replace(self, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a second table says of a job's failure."""

    reason: str
    category: str
    failed_at: float
    restarted_at: float


@dataclass(slots=True)
class _Gathered:
    """The columns as far as they have been read."""

    numbers: dict[str, list[Floats]] = field(default_factory=lambda: {name: [] for name in NUMBERS})
    codes: dict[str, list[Codes]] = field(default_factory=lambda: {name: [] for name in TEXTS})
    indices: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in TEXTS})
    threads: list[NDArray[np.int64]] = field(default_factory=list)
    unreadable: dict[str, int] = field(default_factory=dict)

    def labels(self, name: str) -> Labels:
        """The column of texts called `name`."""
        return Labels(codes=np.concatenate(self.codes[name]), names=tuple(self.indices[name]))


def read_notes(path: Path) -> dict[str, Note]:
    """What the table at `path` says of failures, by id of the job; of several rows of one job the last. Raises UserError."""
    notes: dict[str, Note] = {}
    with opened(path) as rows:
        if "job_id" not in rows.places or "reason" not in rows.places:
            raise UserError(f"{path} needs the columns job_id and reason, it has {_list(rows.header)}")
        for columns in rows.batches():
            failed, restarted = (_numbers(rows, columns, name)[0] for name in ("failed_at", "restarted_at"))
            ids, reasons, categories = (_texts(rows, columns, name) for name in ("job_id", "reason", "category"))
            for job, reason, category, at, again in zip(ids, reasons, categories, failed, restarted, strict=True):
                notes[job] = Note(reason=reason or "unexplained", category=category, failed_at=at, restarted_at=again)
    return notes


def read(path: Path, notes: Mapping[str, Note] | None = None) -> JobTable:
    """The jobs in the table at `path`, "-" for standard input. Raises UserError if it holds none or lacks a column.

    Commas, bars, semicolons or tabs may part the cells. A job that `notes` has a word on has failed, whatever its state.
    """
    gathered = _Gathered()
    with opened(path) as rows:
        _check(rows, path)
        if notes and "job_id" not in rows.places:
            raise UserError(f"{path} has no column job_id: the table of failures cannot be matched with it")
        num_matched = sum(_gather(gathered, rows, columns, notes or {}) for columns in rows.batches())
    if notes and not num_matched:
        raise UserError(f"no job of {path} is in the table of failures: are its job ids those of another cluster?")
    return _table(gathered, rows, path)


def _check(rows: Rows, path: Path) -> None:
    has = set(rows.places) | ({"duration_s"} if {"started_at", "ended_at"} <= set(rows.places) else set())
    missing = [told for name, told in ESSENTIAL.items() if name not in has]
    if missing:
        raise UserError(f"{path} has no column for {' nor for '.join(missing)}: its columns are {_list(rows.header)}")


def _list(header: Sequence[str]) -> str:
    shown = ", ".join(repr(title[:40]) for title in header[:20])
    return f"{shown} and {len(header) - 20} more" if len(header) > 20 else shown


def _gather(gathered: _Gathered, rows: Rows, columns: Columns, notes: Mapping[str, Note]) -> int:
    """Take one batch; how many of its jobs `notes` has a word on."""
    texts = {name: _texts(rows, columns, name) for name in (*TEXTS, "job_id", "user", "name")}
    numbers: dict[str, Floats] = {}
    for name in NUMBERS:
        numbers[name], bad = _numbers(rows, columns, name)
        if bad:
            gathered.unreadable[name] = gathered.unreadable.get(name, 0) + bad
    num_matched = 0
    for row, job in enumerate(texts["job_id"] if notes else ()):
        if note := notes.get(job):
            num_matched += 1
            texts["reason"][row], texts["category"][row] = note.reason, note.category
            texts["state"][row] = "FAILED"
            numbers["failed_at"][row], numbers["restarted_at"][row] = note.failed_at, note.restarted_at
    for name in TEXTS:
        index = gathered.indices[name]
        gathered.codes[name].append(np.array([index.setdefault(text, len(index)) for text in texts[name]], dtype=np.int32))
    for name, values in numbers.items():
        gathered.numbers[name].append(values)
    who = zip(texts["user"], texts["name"], texts["job_id"], strict=True)
    gathered.threads.append(np.array([_thread(*them) for them in who], dtype=np.int64))
    return num_matched


def _thread(user: str, name: str, job: str) -> int:
    """A number that the runs of one job share: 64 bits of hash, which take less memory than a million names."""
    if name and not _ARRAY_TASK.fullmatch(job):
        return hash((user, name))
    return hash((job,)) if job else NO_THREAD


def _numbers(rows: Rows, columns: Columns, name: str) -> tuple[Floats, int]:
    """The column `name`, where the second best name for it fills the gaps of the best; unreadable cells."""
    values = np.full(len(columns[0]), np.nan)
    num_bad = 0
    for place in rows.places.get(name, ()):
        if not np.isnan(values).any():
            break
        found, bad = job_cells.numbers(columns[place], NUMBERS[name])
        values, num_bad = np.where(np.isnan(values), np.array(found), values), num_bad + bad
    return values, num_bad


def _texts(rows: Rows, columns: Columns, name: str) -> list[str]:
    if name not in rows.places:
        return [""] * len(columns[0])
    return [job_cells.label(cell) for cell in columns[rows.places[name][0]]]


def _table(gathered: _Gathered, rows: Rows, path: Path) -> JobTable:
    numbers = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in gathered.numbers.items()}
    duration = _filled(numbers["duration_s"], numbers["started_at"], numbers["ended_at"])
    usable = ~np.isnan(numbers["gpus"])
    if not usable.any():
        raise UserError(f"{path} holds no job whose number of GPUs can be read (column {rows.named('gpus')})")
    left_out = {
        "rows with more or fewer cells than the header": rows.num_broken,
        "steps of jobs": rows.num_steps,
        "without a number of GPUs": int((~usable).sum()),
    }
    table = JobTable(
        gpus=numbers["gpus"],
        duration_s=duration,
        queue_s=_filled(numbers["queue_s"], numbers["submitted_at"], numbers["started_at"]),
        started_at=numbers["started_at"],
        ended_at=numbers["ended_at"],
        failed_at=numbers["failed_at"],
        restarted_at=numbers["restarted_at"],
        thread=np.concatenate(gathered.threads),
        types=gathered.labels("type"),
        states=gathered.labels("state"),
        reasons=gathered.labels("reason"),
        categories=gathered.labels("category"),
        columns={name: rows.named(name) or "" for name in rows.places},
        left_out={why: count for why, count in left_out.items() if count},
        unreadable=gathered.unreadable,
    )
    return table.where(usable)


def _filled(values: Floats, since: Floats, until: Floats) -> Floats:
    """`values`, and from `since` to `until` where there is none."""
    between = until - since
    return np.where(np.isnan(values), np.where(between >= 0, between, np.nan), values)
