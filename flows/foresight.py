"""Keeps the plan table of this process up to date: after every change, what may come next is solved while all is quiet."""

import asyncio
import logging
import time

from tasks.planning import foresee
from tasks.services import services
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.errors import UnicronError

LOOK_S = 0.5
log = logging.getLogger("unicron.foresight")


async def keep_foreseeing() -> None:
    """Look for changes until cancelled. It reads no journal of its own: whoever serves beside it refreshes the state."""
    seen = -1
    while True:
        state = services().journal.state
        if state.seq != seen and is_quiet(state):
            seen = state.seq
            started = time.monotonic()
            try:
                planned = await asyncio.to_thread(foresee, state)
            except UnicronError as error:
                log.warning("no plans are made ahead: %s", error)
            else:
                log.info("planned ahead for %d events in %.2f s", planned, time.monotonic() - started)
        await asyncio.sleep(LOOK_S)


def is_quiet(state: ClusterState) -> bool:
    """Whether nothing is under way and nothing waits: plans are needed for what comes, not for what is."""
    return state.active_plan is None and not state.open_incidents and bool(state.jobs)
