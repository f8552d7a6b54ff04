"""Checks that nobody asked for: of idle nodes that failed and came back, and of those that a new job may start on."""

import asyncio
import logging
import time

from flows.checking import DEADLINE_S, run_check
from tasks.health import publish
from tasks.services import services
from unicron_lib.diagnosis.unasked_checks import due_nodes, told_before_launch
from unicron_lib.domain.checked import LaunchChecked
from unicron_lib.domain.launch_checks import LaunchCheck, check_before_launch
from unicron_lib.domain.plans import content_id

LOOK_S = 5.0
LAUNCH_LOOK_S = 0.5
MEETING_S = 45.0
"""Of a check that a launch waits for."""
SPARE_S = 2.0
"""What a check that takes too long leaves of the time that the launch waits, to say so."""
log = logging.getLogger("unicron.checking")


async def keep_checked() -> None:
    """Look every few seconds, until cancelled; whoever serves beside it refreshes the state."""
    checked = dict[str, float]()
    while services().settings.check_nodes:
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


async def keep_launches_checked() -> None:
    """See to the checks that first starts wait for, until cancelled."""
    while services().policy.launch_check_s:
        await check_launch()
        await asyncio.sleep(LAUNCH_LOOK_S)


async def check_launch() -> None:
    """Check what a launch waits for, if any does, and journal that it waits no more; never raises."""
    try:
        found = services()
        check = check_before_launch(found.journal.state, time.time(), found.policy.launch_check_s)
        if check is None:
            return
        told = await _result(check)
        name = content_id("launch-check", *check.incidents)
        await publish(LaunchChecked(id=name, at=time.time(), incidents=check.incidents, jobs=check.jobs, told=told))
        log.info("before %s starts: %s", ", ".join(check.jobs), told)
    except Exception as error:  # noqa: BLE001 - the launch waits for a limited time only
        log.warning("a launch is not told of its check: %s", error)


async def _result(check: LaunchCheck) -> str:
    """What the check has found, or why there was none."""
    try:
        async with asyncio.timeout(max(0.0, check.until - SPARE_S - time.time())):
            rows = await run_check(list(check.nodes), MEETING_S)
    except TimeoutError:
        return "its nodes were not checked: that took too long"
    except Exception as error:  # noqa: BLE001 - whatever ails the check, the job starts
        return f"its nodes were not checked: {error or type(error).__name__}"
    return told_before_launch({str(row["node"]): str(row["verdict"]) for row in rows})
