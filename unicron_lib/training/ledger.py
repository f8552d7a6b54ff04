"""What was consumed: one JSON line for each iteration that a rank has completed, and the proof that nothing was lost.

A line holds the samples whose gradients were summed in the iteration, of all ranks: each rank marks its own in the
all-reduced buffer, so that the list is what really went into the step, and one surviving file tells all. It is
written when the optimizer step is done.

Lineage: an iteration may be done several times, by the generation that was interrupted and by the one that went back to a
checkpoint. All of them start from equal parameters, so the highest generation that has done an iteration counts. The file of
a generation that leaves batches out begins with a line that says which.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.skipping import Ranges, told
from unicron_lib.training.data import open_corpus, sample_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An iteration (0-based) as one rank saw it; `samples` and `loss` (mean over them) are the whole job's."""

    iteration: int
    samples: list[int]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The batches that a generation leaves out."""

    skipped: Ranges


_line: TypeAdapter[Entry | LeftOut] = TypeAdapter(Entry | LeftOut)


class Ledger:
    """The file of one rank of one generation; each line is one write, so that a kill leaves at most a partial last line."""

    def __init__(self, directory: Path, *, generation: int, rank: int, skipped: Ranges = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"g{generation}-r{rank}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if skipped:
            self._append({"skipped": skipped})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def write(self, entry: Entry) -> None:
        """Append an iteration."""
        self._append({"iteration": entry.iteration, "samples": entry.samples, "loss": entry.loss})

    def _append(self, line: Mapping[str, object]) -> None:
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def ledger_directory(run_dir: Path, job: str) -> Path:
    """Where the ranks of a job on this node write."""
    return run_dir / "ledger" / job


def read_lineage(*directories: Path) -> tuple[dict[int, Entry], list[str]]:
    """For each iteration the entry of the highest generation that has done it, and the contradictions found."""
    newest: dict[int, tuple[int, Entry]] = {}
    problems: list[str] = []
    for path in _files(*directories):
        generation = _generation_of(path)
        for entry in _read(path, problems):
            if isinstance(entry, LeftOut):
                continue
            known = newest.get(entry.iteration)
            if known is None or known[0] < generation:
                newest[entry.iteration] = (generation, entry)
            elif known[0] == generation and known[1] != entry:
                problems.append(
                    f"iteration {entry.iteration}: ranks of generation {generation} saw different samples or losses"
                )
    return {iteration: entry for iteration, (_, entry) in sorted(newest.items())}, problems


def read_left_out(*directories: Path) -> Ranges:
    """The batches that the newest generation left out."""
    files = _files(*directories)
    newest = [path for path in files if _generation_of(path) == max(map(_generation_of, files))]
    lines = (line for path in newest for line in _read(path, []))
    return next((line.skipped for line in lines if isinstance(line, LeftOut)), ())


def check_ledger(directory: Path | Sequence[Path], spec: JobSpec, skipped: Ranges = ()) -> list[str]:
    """Problems found; empty if every sample of all `train_iters` iterations was consumed once, in canonical order.

    Give the directories of all nodes on which the job ran, and the batches that were to be `skipped`: those and no others.
    """
    directories = [directory] if isinstance(directory, Path) else directory
    lineage, problems = read_lineage(*directories)
    left_out = read_left_out(*directories)
    if left_out != skipped:
        problems.append(f"the batches {told(left_out) or 'none'} were left out, to be left out were {told(skipped) or 'none'}")
    order = sample_order(spec, open_corpus(spec), skipped)
    for iteration in range(spec.train_iters):
        wanted = order.samples(iteration)
        entry = lineage.get(iteration)
        if entry is None:
            problems.append(f"iteration {iteration} was never completed")
        elif entry.samples != wanted:
            problems.append(f"iteration {iteration} consumed {entry.samples}, canonical are {wanted}")
    problems += [f"iteration {iteration} is beyond train_iters" for iteration in lineage if iteration >= spec.train_iters]
    return problems


def _files(*directories: Path) -> list[Path]:
    return sorted(path for directory in directories for path in directory.glob("g*-r*.jsonl"))


def _generation_of(path: Path) -> int:
    return int(path.name[1:].partition("-")[0])


def _read(path: Path, problems: list[str]) -> Iterator[Entry | LeftOut]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield _line.validate_json(line)
        except ValidationError:
            problems.append(f"{path.name} line {number} is damaged")
