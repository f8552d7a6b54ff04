"""The end of a node that is known ahead: it is announced, and the ranks are let go before the agent ends."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from unicron_lib.agent.bell import Bell
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.ranks import Ranks

log = logging.getLogger(__name__)
ASKED = "its agent was asked to stop"
LOOK_S = 0.2
ALONE_S = 5.0
"""A controller that has been away for so long is not waited for: it may be going down as well."""
STOP_S = 15.0
"""So long after the last rank has ended a plan may take until it is done with this node: all its jobs part first."""

SAY_S = 2.0
"""What a node without ranks has to get its word out."""


class Connection(Protocol):
    """What has to be known of the connection to the controller."""

    @property
    def is_open(self) -> bool:
        """Whether there is a controller."""

    @property
    def is_quiet(self) -> bool:
        """Whether everything is told and no command is being carried out."""


class Leaving:
    """Announces the end of the node, once in each life of the agent."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        bell: Bell,
        life: Callable[[], str],
        jobs: Callable[[], tuple[str, ...]],
        tell: Callable[[NodeLeaving], None],
    ) -> None:
        self._ranks = ranks
        self._bell = bell
        self._life = life
        self._jobs = jobs
        self._tell = tell
        self._told_in = ""

    def announce(self, reason: str, leaves_at: float) -> None:
        """The node is gone by `leaves_at` (epoch s)."""
        if self._told_in != self._life():
            self._told_in = self._life()
            log.warning("this node leaves in %.0f s: %s", leaves_at - time.time(), reason)
            self._tell(NodeLeaving(reason=reason, leaves_at=leaves_at, jobs=self._jobs()))

    async def until_released(self, connection: Connection, *, limit_s: float) -> None:
        """Announce it and wait until a plan has taken all ranks from here, `limit_s` at most; not where nobody can answer."""
        self.announce(ASKED, time.time() + limit_s)
        if not connection.is_open:
            log.info("there is no connection to the controller: nobody is waited for")
            return
        now = time.monotonic()
        ends_at, heard_at, alive_at = now + limit_s, now, now if self._ranks.alive else now - STOP_S + SAY_S
        while not self._is_over(connection):
            self.announce(ASKED, time.time() + limit_s)  # also in a life that begins meanwhile
            await self._bell.until(lambda: self._is_over(connection), timeout_s=LOOK_S)
            now = time.monotonic()
            heard_at = now if connection.is_open else heard_at
            alive_at = now if self._ranks.alive else alive_at
            if now > min(ends_at, heard_at + ALONE_S, alive_at + STOP_S):
                log.warning("nobody has let this node go in time: %d ranks still run", len(self._ranks.alive))
                return

    def _is_over(self, connection: Connection) -> bool:
        """Whether plans are done with this node: they have ended, and forgotten, each rank, and have been answered."""
        return not self._ranks.where(lambda _: True) and (connection.is_quiet or not connection.is_open)
