"""Copies the newest state in this node's memory to a peer, again and again, in the background."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.agent.slot_wire import be_nice, offer
from unicron_lib.checkpointing.slot_header import Place, SlotHeader
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.errors import SlotError

log = logging.getLogger(__name__)
DUTY = 0.05
"""The part of the time in which states travel: neither the network nor a core is to notice."""
MOST_PAUSE_S = 1800.0
"""Between two copies at most: slots that are not touched for an hour are removed."""
RETRY_S = 5.0
REMIND_S = 600.0
"""A peer is told so often that a state that has not changed is still needed."""


@dataclass(slots=True, kw_only=True)
class Following:
    """A job whose states, or one of `parts` of them, are copied to the first of `peers` that takes them.

    Times are monotonic.
    """

    peers: list[str]
    parts: int = 1
    place: Place = (-1, -1)
    told_at: float = 0.0
    free_at: float = 0.0

    def is_due(self, place: Place, now: float) -> bool:
        """Whether the state of `place`, the newest one here, is to be offered now."""
        return now >= self.free_at and (place > self.place or now - self.told_at >= REMIND_S)

    def was_taken(self, place: Place, began: float, ended: float) -> None:
        """The peer has it."""
        self.place, self.told_at = place, ended
        self.free_at = ended + min((ended - began) * (self.parts / DUTY - 1), MOST_PAUSE_S)

    def was_not_taken(self, now: float) -> None:
        """The next peer is asked a little later."""
        self.peers.append(self.peers.pop(0))
        self.place, self.free_at = (-1, -1), now + RETRY_S


class Copying:
    """The jobs of this node whose states are copied to peers, one at a time."""

    def __init__(self, house: SlotHouse, token: str) -> None:
        self._house = house
        self._token = token
        self._jobs: dict[tuple[str, str], Following] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="copying", initializer=be_nice)

    def follow(self, job: str, peers: Sequence[str], parts: Collection[str] = ("",)) -> None:
        """From here on copy the job's states to the first of `peers`, `HOST:PORT`, that takes them; to nobody if empty.

        They are whole ones, or `parts` that are kept on this node.
        """
        known = {part: it for (of, part), it in self._jobs.items() if of == job}
        self._jobs = {key: it for key, it in self._jobs.items() if key[0] != job}
        for part in parts if peers else ():
            before = known.get(part)
            is_same = before is not None and sorted(before.peers) == sorted(peers)
            self._jobs[job, part] = before if before and is_same else Following(peers=list(peers))
            self._jobs[job, part].parts = len(parts)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Of all others no ranks are left here."""
        self._jobs = {key: it for key, it in self._jobs.items() if key[0] in jobs}

    async def look(self) -> None:
        """Offer what is new, and due."""
        for (job, part), it in list(self._jobs.items()):
            slots = self._house.travelling(job, part) if part else self._house.pair(job)
            newest = next(iter(slots.found()), None)
            if newest is None:
                continue
            if part and newest.place == it.place:
                self._want_another(it, slots)
            elif it.is_due(newest.place, time.monotonic()):
                await self._offer(it, slots, newest)

    def _want_another(self, it: Following, slots: SlotPair) -> None:
        """All parts of an iteration have to travel before the next ones do: its ranks wait until all are marked."""
        if time.monotonic() >= it.free_at and not slots.has_travelled:
            slots.mark_travelled(it.place)

    async def _offer(self, it: Following, slots: SlotPair, header: SlotHeader) -> None:
        began, peer = time.monotonic(), it.peers[0]
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, offer, peer, self._token, slots, header)
        except (SlotError, OSError) as error:
            log.warning("iteration %d of %s is not copied to %s: %s", header.iteration, header.job, peer, error)
            it.was_not_taken(time.monotonic())
        else:
            it.was_taken(header.place, began, time.monotonic())

    def close(self) -> None:
        """Begin nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)
