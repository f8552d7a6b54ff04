"""Looks whether this node's instance is to be taken back."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from unicron_lib.agent.leaving import Leaving
from unicron_lib.agent.messages import NodeNotice
from unicron_lib.errors import MetadataError

if TYPE_CHECKING:
    from unicron_lib.adapters.instance_metadata import InstanceMetadata

log = logging.getLogger(__name__)
LOOK_S = 5.0
"""As AWS recommends."""
AHEAD_S = 120.0
"""So long before a scheduled end the node leaves; a spot interruption is told no earlier."""
BLIND_AFTER = 3
BLIND = "spot_notices_blind"


class SpotWatch:
    """Asks the metadata service at `endpoint`; without one nothing is done until a notice is injected."""

    def __init__(
        self, *, endpoint: str | None, leaving: Leaving, life: Callable[[], str], tell: Callable[[NodeNotice], None]
    ) -> None:
        self._endpoint = endpoint
        self._leaving = leaving
        self._life = life
        self._tell = tell
        self._injected: tuple[str, float] | None = None
        self._news = asyncio.Event()
        self._num_failed = 0
        self._blind_in = ""

    def inject(self, seconds: float) -> None:
        """From now on the instance is to be taken back in so many seconds, as far as this node can tell."""
        self._injected = "a spot interruption notice was injected", time.time() + seconds
        self._news.set()

    async def run(self) -> None:
        """Look until cancelled; each life of the agent is told anew."""
        if self._endpoint is None:
            await self._keep_looking(None)
            return
        from unicron_lib.adapters.instance_metadata import InstanceMetadata  # only where it is needed: it imports a client

        service = InstanceMetadata(self._endpoint)
        try:
            await self._keep_looking(service)
        finally:
            await service.close()

    async def _keep_looking(self, service: "InstanceMetadata | None") -> None:
        while True:
            self._news.clear()
            if found := self._injected or (await self._asked(service) if service else None):
                self._leaving.announce(*found)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if service or self._injected else None):
                    await self._news.wait()

    async def _asked(self, service: "InstanceMetadata") -> tuple[str, float] | None:
        try:
            notice = await service.interruption()
            if notice is None:
                due = [it for it in await service.scheduled() if psutil.boot_time() < it.at <= time.time() + AHEAD_S]
                notice = min(due, key=lambda it: it.at, default=None)
        except MetadataError as error:
            self._failed(error)
            return None
        self._saw()
        return (notice.what, notice.at) if notice else None

    def _failed(self, error: MetadataError) -> None:
        self._num_failed += 1
        if self._num_failed >= BLIND_AFTER and self._blind_in != self._life():
            self._blind_in = self._life()
            log.warning("%s", error)
            self._tell(NodeNotice(code=BLIND, text=f"no notice of this instance's end would be seen: {error}"))

    def _saw(self) -> None:
        self._num_failed = 0
        if self._blind_in:
            self._blind_in = ""
            self._tell(NodeNotice(code=BLIND, text="notices of this instance's end are seen again", active=False))
