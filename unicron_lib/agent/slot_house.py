"""The slots of a node: found, compared, and removed when nobody needs them any more."""

import logging
import os
import shutil
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unicron_lib.agent.slot_places import PREFIX, SHARED
from unicron_lib.checkpointing.slot_header import SlotHeader
from unicron_lib.checkpointing.slots import ALL, ASIDE, TRAVELS, SlotPair, is_own, parts_in
from unicron_lib.domain.parts import replica_with
from unicron_lib.errors import SlotError

log = logging.getLogger(__name__)
IDLE_S = 3600.0
"""Slots of a job that neither runs here nor is copied to here for so long are removed: its checkpoints are in the store."""

MOST_THREADS = 8
"""That compare slots: one alone does not read as fast as memory gives."""


class SlotHouse:
    """The slots below `directory`, by job. What is asked about a job that has none is answered with nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def pair(self, job: str, part: str = "") -> SlotPair:
        """The slots of a job, or of a part of its state."""
        return SlotPair(self.directory / job, part)

    def travelling(self, job: str, part: str, *numbers: int) -> SlotPair:
        """The slot of a part that is to go to another node, or the one of other `numbers`."""
        return SlotPair(self.directory / job, part, numbers or TRAVELS)

    def all_of(self, job: str, part: str = "") -> SlotPair:
        """All slots in which there may be a state of the job, or that part of one: to be read."""
        return SlotPair(self.directory / job, part, ALL)

    def touch(self, job: str) -> None:
        """Somebody needs the job's slots."""
        try:
            os.utime(self.directory / job)
        except OSError as error:
            log.info("the slots of %s are gone: %s", job, error)

    def compared(self, job: str) -> tuple[list[SlotHeader], list[str]]:
        """The furthest slot of the job whose state is what its header tells of, and why others are not used; takes its time.

        Of parts of a state all such slots are told: other nodes must have the others' of the same iteration.
        """
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            found = list(pool.map(_compared, (self.all_of(job, part) for part in parts_in(self.directory / job))))
        return [header for whole, _ in found for header in whole], [reason for _, reasons in found for reason in reasons]

    def forget(self, job: str, below_generation: int) -> int:
        """Remove the job's slots of generations below; the number of them."""
        directory = self.directory / job
        removed = sum(self.all_of(job, part).forget(below_generation) for part in parts_in(directory))
        if directory.is_dir() and not any(directory.iterdir()):
            shutil.rmtree(directory, ignore_errors=True)
        return removed

    def forget_other_layouts(self, job: str, parts: Collection[str], *, generation: int, travel: bool) -> int:
        """Remove older parts of other layouts, once those of `generation`, which may `travel`, are as safe; their number."""
        if not all(self._is_safe(job, part, generation, travel=travel) for part in parts):
            return 0
        layouts = {replica_with(part) for part in parts}
        others = (part for part in parts_in(self.directory / job) if replica_with(part) not in layouts)
        return sum(self.all_of(job, part).forget(generation) for part in others)

    def _is_safe(self, job: str, part: str, generation: int, *, travel: bool) -> bool:
        """Whether all ranks have kept an iteration, which none does twice before, and of parts that are copied one has been."""
        kept = [it for it in self.pair(job, part).found() if it.generation >= generation]
        copied = (it.generation >= generation for it in self.travelling(job, part, ASIDE).found())
        return len(kept) >= (2 if part else 1) and (not travel or not part or any(copied))

    def sweep(self, busy: Collection[str]) -> None:
        """Remove what nobody has needed for IDLE_S, also of agents of this user that are gone; `busy` jobs have ranks here."""
        for job in busy:
            if (self.directory / job).is_dir():
                self.touch(job)
        for house in filter(is_own, SHARED.glob(f"{PREFIX}{os.geteuid()}-*")):
            for unused in filter(_is_idle, _directories(house)):
                log.info("%s is removed: nobody has needed it for %.0f s", unused, IDLE_S)
                shutil.rmtree(unused, ignore_errors=True)
            if house != self.directory and _is_idle(house) and not _directories(house):
                shutil.rmtree(house, ignore_errors=True)

    def wipe(self) -> None:
        """Remove everything: the node's memory is lost."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _compared(slots: SlotPair) -> tuple[list[SlotHeader], list[str]]:
    whole, reasons = list[SlotHeader](), list[str]()
    for place in dict.fromkeys(header.place for header in slots.found()):
        try:
            whole.append(slots.check(place))
        except (SlotError, OSError) as error:
            reasons.append(str(error))
            continue
        if not slots.part:
            break
    return whole, reasons


def _is_idle(directory: Path) -> bool:
    return time.time() - directory.stat().st_mtime > IDLE_S


def _directories(house: Path) -> list[Path]:
    return [entry for entry in house.iterdir() if entry.is_dir()] if house.is_dir() else []
