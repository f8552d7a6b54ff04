"""Find out why an incident happened, beside its recovery: no decision waits for it or is changed by it."""

import asyncio
import logging
import sys

from prefect import task
from pydantic import ValidationError

from tasks.events import emit_diagnosis
from tasks.services import services
from unicron_lib.agent.inquiries import ReadLog
from unicron_lib.diagnosis.case import Case, case_json, case_of, diagnosed_json, ranks_to_read
from unicron_lib.diagnosis.tails import Tail
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.failures import Failure
from unicron_lib.errors import ControllerError, UnicronError

READ_S = 10.0
"""For a node to send a log."""
LIMIT_S = 120.0
"""For the process that diagnoses; it yields to everything else on its host."""
log = logging.getLogger("unicron.diagnosis")


@task(name="diagnose", task_run_name="diagnose {incident}")
async def diagnose_incident(incident: str) -> IncidentDiagnosed:
    """Journal why `incident` happened, as its ranks' logs and its evidence tell. Twice has the effect of once.

    Raises UnicronError if that cannot be found out now.
    """
    journal = services().journal
    state = await asyncio.to_thread(journal.refresh)
    found = await asyncio.gather(*(_tail(failure) for failure in ranks_to_read(state.incidents[incident])))
    logs = tuple(it for it in found if isinstance(it, Tail))
    unread = tuple(it for it in found if isinstance(it, str))
    told = await _concluded(case_of(state, incident, logs, unread))
    if await asyncio.to_thread(journal.append, told):
        await emit_diagnosis(journal.state.incidents[incident])
    log.info("%s: %s, %s", incident, told.kind, told.root_cause)
    return told


async def _tail(failure: Failure) -> Tail | str:
    """The end of the log of the rank that failed, or why it is not to be had."""
    assert failure.job is not None
    assert failure.generation is not None
    assert failure.rank is not None
    node = str(failure.node)
    step = f"read-log/{failure.job}/{failure.generation}/{failure.rank}"
    command = ReadLog(step=step, job=failure.job, generation=failure.generation, rank=failure.rank)
    try:
        reply = await services().controller.command(node, command, timeout_s=READ_S)
    except ControllerError as error:
        return f"{failure.job} rank {failure.rank} at {node}: {error}"
    if not reply.ok:
        return f"{failure.job} rank {failure.rank} at {node}: {reply.error}"
    values = reply.result
    return Tail(file=f"{node}:{values['file']}", first_line=int(str(values["first_line"])), packed=str(values["packed"]))


async def _concluded(case: Case) -> IncidentDiagnosed:
    """What the diagnosis finds, in a process of its own."""
    program = (sys.executable, "-m", "unicron_lib.diagnosis.case")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(LIMIT_S):
            out, complaint = await process.communicate(case_json.dump_json(case))
        if process.returncode:
            last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            raise UnicronError(f"the diagnosis ended with code {process.returncode}: {last}")
        return diagnosed_json.validate_json(out)
    except TimeoutError:
        raise UnicronError(f"the diagnosis was not done within {LIMIT_S:g} s") from None
    except ValidationError as error:
        raise UnicronError(f"the diagnosis said what nobody understands: {error}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
