"""The node check's effects: one task a meeting, and one that journals what follows from the verdicts."""

import asyncio
import time
from collections.abc import Mapping

from prefect import task
from pydantic import TypeAdapter

from tasks.health import publish
from tasks.services import services
from unicron_lib.agent.inquiries import CheckNode
from unicron_lib.agent.messages import OpenRendezvous, Reply, StopRanks
from unicron_lib.diagnosis.check_consequences import consequences
from unicron_lib.diagnosis.node_check import Finding, Group, Meeting, Report
from unicron_lib.domain.cluster import Node
from unicron_lib.errors import ControllerError

JOB = "node-check"
"""Whose generations the meetings are: a newer one on a node replaces an older one."""
START_S = 30.0
"""Beyond a meeting's deadline, for processes that have to be started and ended."""
_report: TypeAdapter[Report] = TypeAdapter(Report)


@task(name="meet", task_run_name="turn {turn}: {group}")
async def meet(group: Group, turn: int, generation: int, deadline_s: float) -> Meeting:
    """Have the nodes of `group` test themselves and exchange data; one whose agent does not play along is absent."""
    opening = OpenRendezvous(step=f"{JOB}/{generation}/open", job=JOB, generation=generation)
    opened = await _ask(group[0], opening)
    if isinstance(opened, str):
        absent = (Report(node=group[0], error=opened, absent=True),)
        return Meeting(turn=turn, reports=absent + tuple(Report(node=node) for node in group[1:]))
    try:
        reports = await asyncio.gather(*(_check(group, rank, opened, generation, deadline_s) for rank in range(len(group))))
    finally:
        closing = StopRanks(step=f"{JOB}/{generation}/close", job=JOB, below_generation=generation + 1, grace_s=1.0)
        await _ask(group[0], closing)
    return Meeting(turn=turn, reports=tuple(reports))


async def _check(group: Group, rank: int, opened: Reply, generation: int, deadline_s: float) -> Report:
    command = CheckNode(
        step=f"{JOB}/{generation}/{rank}",
        job=JOB,
        generation=generation,
        rank=rank,
        world_size=len(group),
        master_addr=str(opened.result["address"]),
        master_port=int(str(opened.result["port"])),
        deadline_s=deadline_s,
    )
    reply = await _ask(group[rank], command, timeout_s=deadline_s + START_S)
    if isinstance(reply, str):
        return Report(node=group[rank], error=reply, absent=True)
    return _report.validate_python({"node": group[rank], **reply.result})


async def _ask(node: str, command: OpenRendezvous | CheckNode | StopRanks, *, timeout_s: float = START_S) -> Reply | str:
    """The agent's answer, or why there is none."""
    try:
        reply = await services().controller.command(node, command, timeout_s=timeout_s)
    except ControllerError as error:
        return str(error)
    return reply if reply.ok else reply.error


@task(name="conclude")
async def conclude(check: str, findings: tuple[Finding, ...], nodes: Mapping[str, Node]) -> list[str]:
    """Journal what follows from `findings` about `nodes`; the types of the events. Twice has the effect of once."""
    state = await asyncio.to_thread(services().journal.refresh)
    events = list(consequences(state, findings, check=check, nodes=nodes, at=time.time()))
    for event in events:
        await publish(event)
    return [event.type for event in events]
