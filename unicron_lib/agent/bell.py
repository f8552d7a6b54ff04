"""Waiting for a condition that somebody else's message will bring about, without polling."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Rung at every change of the state that waiters look at."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Have all waiters look again."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def until(self, met: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `met()` holds or `timeout_s` have passed; whether it holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not met():
                    await self._rung.wait()
        return met()
