"""The controller's writing of the journal: in order, in the background, again and again while the store is down."""

import asyncio
import logging
from typing import Protocol

from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event
from unicron_lib.errors import IllegalTransition

log = logging.getLogger(__name__)
BACK_OFF_S = (0.2, 3.0)


class JournalPort(Protocol):
    """What the controller needs of `unicron_lib.journal.Journal`; both block."""

    def append(self, event: Event) -> bool:
        """Journal the event; False if its id is there already."""
        ...

    def refresh(self) -> ClusterState:
        """Read what others have written."""
        ...


class Recorder:
    """Appends events one after the other; `error` says why the journal cannot be written now, else is empty."""

    def __init__(self, journal: JournalPort) -> None:
        self.error = ""
        self._journal = journal
        self._queue: asyncio.Queue[tuple[Event, asyncio.Future[bool]]] = asyncio.Queue()

    def record(self, event: Event) -> asyncio.Future[bool]:
        """Append `event` as soon as the store lets us; the result is False if it was there already."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((event, done))
        return done

    async def state(self) -> ClusterState:
        """The cluster as the journal tells it now; raises StoreError."""
        return await asyncio.to_thread(self._journal.refresh)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            event, done = await self._queue.get()
            appended = await self._append(event)
            if not done.done():
                done.set_result(appended)

    async def _append(self, event: Event) -> bool:
        back_off_s = BACK_OFF_S[0]
        while True:
            try:
                appended = await asyncio.to_thread(self._journal.append, event)
            except IllegalTransition as error:
                log.warning("%s is not journalled: %s", event.id, error)
                return False
            except Exception as error:  # noqa: BLE001  # whatever the store does, agents must stay connected
                if not self.error:
                    log.warning("cannot journal %s: %s; trying again until it works", event.id, error)
                self.error = str(error) or type(error).__name__
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, BACK_OFF_S[1])
            else:
                self.error = ""
                return appended
