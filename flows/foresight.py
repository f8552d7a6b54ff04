"""While all is quiet, the recovery service looks ahead: it plans for what may come next, and for what could be better."""

import asyncio
import logging
import time

from tasks.health import publish
from tasks.planning import better_pools, foresee
from tasks.services import services
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.errors import UnicronError

LOOK_S = 0.5
log = logging.getLogger("unicron.foresight")


async def keep_foreseeing() -> None:
    """After every change plan for what may come next, until cancelled; whoever serves beside it refreshes the state."""
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


async def keep_rebalancing() -> None:
    """Now and then see whether jobs had better change pools, until cancelled."""
    every_s = services().settings.rebalance_s
    while every_s:
        await asyncio.sleep(every_s)
        state = services().journal.state
        if not is_quiet(state):
            continue
        try:
            due = await asyncio.to_thread(better_pools, state)
            if due and services().journal.state.seq == state.seq:
                await publish(due)
        except UnicronError as error:
            log.warning("the pools are not looked at: %s", error)


def is_quiet(state: ClusterState) -> bool:
    """Whether nothing is under way and nothing waits: plans are needed for what comes, not for what is."""
    return state.active_plan is None and not state.open_incidents and bool(state.jobs)
