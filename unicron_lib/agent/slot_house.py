"""The slots of a node: found, compared, and removed when nobody needs them any more."""

import logging
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from unicron_lib.agent.slot_places import PREFIX, SHARED
from unicron_lib.checkpointing.slots import SlotHeader, SlotPair, is_own
from unicron_lib.errors import SlotError

log = logging.getLogger(__name__)
IDLE_S = 3600.0
"""Slots of a job that neither runs here nor is copied to here for so long are removed: its checkpoints are in the store."""


class SlotHouse:
    """The slots below `directory`, by job. What is asked about a job that has none is answered with nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def pair(self, job: str) -> SlotPair:
        """The slots of a job."""
        return SlotPair(self.directory / job)

    def touch(self, job: str) -> None:
        """Somebody needs the job's slots."""
        try:
            os.utime(self.directory / job)
        except OSError as error:
            log.info("the slots of %s are gone: %s", job, error)

    def compared(self, job: str) -> tuple[list[SlotHeader], list[str]]:
        """The furthest slot of the job whose state is what its header tells of, and why others are not used; takes its time."""
        pair, reasons = self.pair(job), list[str]()
        for header in pair.found():
            try:
                return [pair.check(header.place)], reasons
            except (SlotError, OSError) as error:
                reasons.append(str(error))
        return [], reasons

    def forget(self, job: str, below_generation: int) -> int:
        """Remove the job's slots of generations below; the number of them."""
        removed = self.pair(job).forget(below_generation)
        directory = self.directory / job
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
