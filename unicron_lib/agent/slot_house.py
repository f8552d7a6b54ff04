"""The slots of a node: found, compared, and removed when nobody needs them any more."""

import logging
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from unicron_lib.agent.slot_places import PREFIX, SHARED
from unicron_lib.checkpointing.slots import TRAVELS, SlotHeader, SlotPair, is_own, parts_in
from unicron_lib.errors import SlotError

log = logging.getLogger(__name__)
IDLE_S = 3600.0
"""Slots of a job that neither runs here nor is copied to here for so long are removed: its checkpoints are in the store."""


class SlotHouse:
    """The slots below `directory`, by job. What is asked about a job that has none is answered with nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def pair(self, job: str, part: str = "") -> SlotPair:
        """The slots of a job, or of a part of its state."""
        return SlotPair(self.directory / job, part)

    def travelling(self, job: str, part: str) -> SlotPair:
        """The slot of a part that is to go to another node."""
        return SlotPair(self.directory / job, part, TRAVELS)

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
        whole, reasons = list[SlotHeader](), list[str]()
        for pair in (self.pair(job, part) for part in parts_in(self.directory / job)):
            for header in pair.found():
                try:
                    whole.append(pair.check(header.place))
                except (SlotError, OSError) as error:
                    reasons.append(str(error))
                    continue
                if not pair.part:
                    break
        return whole, reasons

    def forget(self, job: str, below_generation: int) -> int:
        """Remove the job's slots of generations below; the number of them."""
        directory = self.directory / job
        slots = [of(job, part) for part in parts_in(directory) for of in (self.pair, self.travelling)]
        removed = sum(pair.forget(below_generation) for pair in slots)
        if directory.is_dir() and not any(directory.iterdir()):
            shutil.rmtree(directory, ignore_errors=True)
        return removed

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


def _is_idle(directory: Path) -> bool:
    return time.time() - directory.stat().st_mtime > IDLE_S


def _directories(house: Path) -> list[Path]:
    return [entry for entry in house.iterdir() if entry.is_dir()] if house.is_dir() else []
