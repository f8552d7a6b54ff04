"""Megatron-LM's checkpoint directory: what it would resume from, and what is whole. Pure over a listing of files.

    latest_checkpointed_iteration.txt     the tracker: a number, or `release`
    iter_0000010/mp_rank_00/model_optim_rng.pt          the format `torch`; mp_rank_TP, mp_rank_TP_PPP, mp_rank_TP_PPP_EEE,
    iter_0000010/mp_rank_00/distrib_optim.pt            this one beside it with --use-distributed-optimizer
    iter_0000010/{metadata.json,common.pt,.metadata,__0_0.distcp}     the format `torch_dist`

Megatron writes an iteration first and the tracker after it, in place: a crash leaves an iteration that is incomplete, or a
tracker that is cut off, and a deleted iteration leaves a tracker that points to nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})/(.+)")
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/(.+)")
_MODEL, _OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_OLD_MODEL = "model_rng.pt"
_WRITTEN_LAST = ".metadata"
"""Of torch's distributed checkpoints: it names all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An iteration in the directory; `problem` is empty if it is complete, `num_parts` how many model-parallel ranks it has."""

    iteration: int
    format: Literal["torch", "torch_dist", "unknown"]
    problem: str = ""
    num_parts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What is in a directory: `saved` by iteration, and what the tracker says; None if there is no tracker."""

    saved: tuple[Saved, ...]
    tracker: str | None

    @property
    def resumes_from(self) -> int | Literal["release"] | None:
        """What Megatron would load: an iteration, the release, or nothing. None also for a tracker that would end it."""
        word = (self.tracker or "").strip()
        if word == "release":
            return "release"
        return int(word) if word.isascii() and word.isdigit() else None

    @property
    def newest_complete(self) -> int | None:
        """The highest iteration that is complete."""
        return max((it.iteration for it in self.saved if not it.problem), default=None)

    @property
    def problem(self) -> str:
        """Why Megatron would not go on from the newest that was saved, in words; empty if it would, or there is nothing."""
        if self.tracker is None:
            return f"there is no {TRACKER}, so that it begins anew" if self.newest_complete is not None else ""
        target = self.resumes_from
        if target == "release":
            return ""
        if target is None:
            return f"{TRACKER} says {self.tracker.strip()[:40]!r}, which Megatron cannot read"
        known = next((it for it in self.saved if it.iteration == target), None)
        if known is None:
            return f"{TRACKER} points to iteration {target}, which is not there"
        return f"{TRACKER} points to iteration {target}, {known.problem}" if known.problem else ""

    @property
    def repaired_tracker(self) -> str | None:
        """What the tracker should say instead; None if it is right, or nothing better is there.

        A tracker that is missing stays so: its owner may have removed it to begin anew.
        """
        if self.tracker is None or not self.problem or self.newest_complete is None:
            return None
        return str(self.newest_complete)


def read_layout(files: Mapping[str, int], tracker: str | None) -> Checkpoints:
    """What a directory holds, by the sizes of its files (relative paths, `/`) and the content of its tracker."""
    parts: dict[int, dict[str, int]] = {}
    for path, size in files.items():
        if match := _ITERATION.fullmatch(path):
            parts.setdefault(int(match[1]), {})[match[2]] = size
    found = Checkpoints(saved=tuple(_judged(number, parts[number]) for number in sorted(parts)), tracker=tracker)
    return Checkpoints(saved=tuple(_compared(found)), tracker=tracker)


def _judged(iteration: int, files: Mapping[str, int]) -> Saved:
    empty = sorted(path for path, size in files.items() if size == 0)
    if any(_MODEL_PARALLEL.fullmatch(path) for path in files):
        saved = _torch(iteration, files)
    elif any(path.endswith(".distcp") or path in {_WRITTEN_LAST, "metadata.json", "common.pt"} for path in files):
        saved = _torch_dist(iteration, files)
    else:
        return Saved(iteration=iteration, format="unknown", problem="in which nothing of Megatron's is found")
    if empty and not saved.problem:
        return Saved(iteration=iteration, format=saved.format, problem=f"whose {empty[0]} is empty")
    return saved


def _torch(iteration: int, files: Mapping[str, int]) -> Saved:
    ranks: dict[tuple[int, ...], set[str]] = {}
    for path in files:
        if match := _MODEL_PARALLEL.fullmatch(path):
            ranks.setdefault(tuple(int(it) for it in match.groups()[:3] if it is not None), set()).add(match[4])
    sides = [sorted({place[axis] for place in ranks if len(place) > axis}) for axis in range(max(map(len, ranks)))]
    expected = 1
    for side in sides:
        expected *= side[-1] + 1
    has_optimizer = any(_OPTIMIZER in held for held in ranks.values())
    needed = {_OPTIMIZER} if has_optimizer else set()
    lacking = sorted(place for place, held in ranks.items() if not held & {_MODEL, _OLD_MODEL} or not needed <= held)
    problem = ""
    if len(ranks) < expected:
        problem = f"which has {len(ranks)} of {expected} parts mp_rank_*"
    elif lacking:
        problem = f"whose part mp_rank_{'_'.join(map(str, lacking[0]))} lacks a file"
    return Saved(iteration=iteration, format="torch", problem=problem, num_parts=len(ranks))


def _torch_dist(iteration: int, files: Mapping[str, int]) -> Saved:
    missing = [name for name in (_WRITTEN_LAST, "metadata.json", "common.pt") if name not in files]
    if not any(path.endswith(".distcp") for path in files):
        missing.append("*.distcp")
    problem = f"which lacks {', '.join(missing)}" if missing else ""
    return Saved(iteration=iteration, format="torch_dist", problem=problem)


def _compared(found: Checkpoints) -> list[Saved]:
    """Newer iterations than the tracker's may be unfinished: one with fewer parts than those before it lacks its last ones."""
    target = found.resumes_from
    judged: list[Saved] = []
    usual = 0
    for it in found.saved:
        newer = not isinstance(target, int) or it.iteration > target
        if it.format == "torch" and not it.problem and newer and it.num_parts < usual:
            problem = f"which has {it.num_parts} parts mp_rank_*, those before it {usual}"
            judged.append(Saved(iteration=it.iteration, format="torch", problem=problem, num_parts=it.num_parts))
            continue
        judged.append(it)
        usual = it.num_parts if not it.problem and it.num_parts else usual
    return judged
