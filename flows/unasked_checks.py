"""Nodes that failed and came back are checked while they are idle, before a job is given to them."""

import asyncio
import logging
import time

from flows.checking import DEADLINE_S, run_check
from tasks.services import services
from unicron_lib.diagnosis.unasked_checks import due_nodes

LOOK_S = 5.0
log = logging.getLogger("unicron.checking")


async def keep_checked() -> None:
    """Look every few seconds, until cancelled; whoever serves beside it refreshes the state."""
    checked = dict[str, float]()
    while services().settings.check_nodes != "never":
        await asyncio.sleep(LOOK_S)
        await check_due(checked)


async def check_due(checked: dict[str, float]) -> None:
    """Check what is due, and note in `checked` when; never raises. Agents give a check up as soon as ranks are launched."""
    names: tuple[str, ...] = ()
    try:
        found, now = services(), time.time()
        names = due_nodes(found.journal.state, found.settings.check_nodes, checked, now)
        if not names:
            return
        checked.update(dict.fromkeys(names, now))  # also if it fails: then a person may ask for it
        rows = await run_check(list(names), DEADLINE_S)
        log.info("checked unasked: %s", ", ".join(f"{row['node']} {row['verdict']}" for row in rows))
    except Exception as error:  # noqa: BLE001 - nothing depends on it
        log.warning("%s are not checked: %s", ", ".join(names) or "idle nodes", error)
