"""Looks at a directory in Megatron-LM's layout before a job starts from it, and puts its tracker right if that is wanted."""

import logging
import os
from pathlib import Path

from unicron_lib.checkpointing.megatron_layout import TRACKER, Checkpoints, read_layout

log = logging.getLogger(__name__)
MAX_TRACKER_BYTES = 1000


def tell_and_repair(directory: Path, *, may_repair: bool) -> str:
    """One sentence on what Megatron would go on from. Only the tracker is ever changed; an error is part of the sentence."""
    try:
        found = look(directory)
        sentence = _told(found)
        better = found.repaired_tracker
        if may_repair and better is not None:
            write_tracker(directory, better)
            sentence += f"; put back to iteration {better}"
    except OSError as error:
        sentence = f"{directory} cannot be read: {error.strerror}"
    log.info("checkpoints in %s: %s", directory, sentence)
    return sentence


def look(directory: Path) -> Checkpoints:
    """What is there, nothing if the directory does not exist yet. Raises OSError."""
    if not directory.is_dir():
        return read_layout({}, None)
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size for path in directory.glob("iter_*/**/*") if path.is_file()
    }
    tracker = directory / TRACKER
    try:
        with tracker.open("rb") as file:
            word: str | None = file.read(MAX_TRACKER_BYTES).decode(errors="replace")
    except FileNotFoundError:
        word = None
    return read_layout(files, word)


def write_tracker(directory: Path, word: str) -> None:
    """In one piece, so that no crash leaves half of it. Raises OSError."""
    temporary = directory / f".{TRACKER}.{os.getpid()}"
    with temporary.open("w") as file:
        file.write(word)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / TRACKER)


def _told(found: Checkpoints) -> str:
    newest = (
        "none is complete" if found.newest_complete is None else f"the newest complete one is iteration {found.newest_complete}"
    )
    if found.problem:
        return f"{found.problem}; {newest}"
    target = found.resumes_from
    if target is None:
        return "there is no checkpoint yet"
    return "Megatron goes on from the release" if target == "release" else f"Megatron goes on from iteration {target}"
