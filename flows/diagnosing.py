"""Beside the recoveries: once one is done, the service finds out why its incident happened and tells people."""

import asyncio
import logging
import time
from collections import Counter

from flows.response import plain
from tasks.diagnosis import diagnose_incident
from tasks.reporting import report_diagnosis
from tasks.services import services
from unicron_lib.diagnosis.case import due

LOOK_S = 1.0
TRIES = 3
log = logging.getLogger("unicron.diagnosis")


async def keep_diagnosed() -> None:
    """Diagnose every incident of a failure, one at a time, until cancelled; whoever serves beside it refreshes the state."""
    tries = Counter[str]()
    while True:
        await diagnose_next(tries)
        await asyncio.sleep(LOOK_S)


async def diagnose_next(tries: Counter[str]) -> None:
    """Diagnose one incident that is due, if any; never raises. `tries` counts how often each was begun."""
    name = None
    try:
        name = next((it for it in due(services().journal.state, time.time()) if tries[it] < TRIES), None)
        if name is None:
            return
        tries[name] += 1
        await plain(diagnose_incident, name)
        await report_diagnosis(services().journal.state, name)
    except Exception as error:  # noqa: BLE001 - nothing depends on it
        log.warning("why %s happened is not known: %s", name, error)
