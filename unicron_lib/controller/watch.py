"""Judges the nodes several times a second and journals the suspicions."""

import asyncio
import logging
import time

from unicron_lib.agent.messages import NodeNotice
from unicron_lib.controller.hub import NodeRecord
from unicron_lib.controller.liveness import Verdict, judge
from unicron_lib.controller.service import Controller
from unicron_lib.controller.sight import Outage
from unicron_lib.controller.views import NodeView
from unicron_lib.detection.lateness import Lateness
from unicron_lib.domain.events import NodeCleared, NodeSettled, NodeSuspected

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 0.05
DEAF_S = 1.0
"""A controller that was stopped or held up for longer has not listened: nobody is judged for that time."""


async def watch(controller: Controller) -> None:
    """Judge until cancelled."""
    lateness, postponed, chronic = Lateness(usual_s=LOOK_INTERVAL_S, late_s=DEAF_S), False, False
    while True:
        now = time.monotonic()
        deaf_s = lateness.look(now)
        if deaf_s:
            _forgive(controller, deaf_s)
        if deaf_s is None and not chronic:
            log.error("this controller is held up again and again: from now on silence counts all the same")
        chronic = lateness.is_chronic(now)
        # Once only: what has come in meanwhile is heard before the next look, which judges however late it is.
        postponed = deaf_s is None and not postponed
        if not postponed:
            look_around(controller)
        await asyncio.sleep(LOOK_INTERVAL_S)


def look_around(controller: Controller) -> None:
    """Judge all nodes now."""
    before, now = controller.sight.outage, time.monotonic()
    living = {name: record for name, record in controller.hub.nodes.items() if not record.lost}
    controller.sight.look(now, {name: record.contact for name, record in living.items()})
    if controller.sight.outage is not before:
        _tell_outage(controller, before, controller.sight.outage)
    for record in living.values():
        look_at(controller, record)


def _tell_outage(controller: Controller, before: Outage | None, outage: Outage | None) -> None:
    if outage:
        log.warning("%s: they are not judged for now", outage.text)
    else:
        log.warning("nodes are judged as usual again")
    told = outage or before
    record = controller.hub.nodes.get(told.first) if told else None
    if told and record:
        text = told.text if outage else "nodes are judged as usual again"
        controller.notice(record, NodeNotice(code="controller_blind", text=text, active=outage is not None))


def _forgive(controller: Controller, deaf_s: float) -> None:
    log.warning("this controller did not run for %.1f s: no node is judged for that time", deaf_s)
    for record in controller.hub.nodes.values():
        record.heard_at += deaf_s
        if record.ended_at is not None:
            record.ended_at += deaf_s


def look_at(controller: Controller, record: NodeRecord) -> None:
    """Judge a node now and act on a verdict that has changed."""
    if record.lost:
        return
    now = time.monotonic()
    verdict, reason = _verdict(controller, record, now)
    if verdict is not Verdict.ALIVE and not record.suspected:
        _suspect(controller, record, reason)
    if verdict is Verdict.ALIVE and record.suspected:
        _clear(controller, record)
    if verdict is Verdict.ALIVE and record.link and record.settles_at is not None and now >= record.settles_at:
        _settle(controller, record)
    if verdict is Verdict.LOST:
        log.warning("node %s is lost: %s", record.hello.node, reason)
        controller.declare_lost(record, silent_s=now - record.heard_at, reason=reason)


def view(controller: Controller, record: NodeRecord) -> NodeView:
    """A node as it looks now."""
    now = time.monotonic()
    verdict, reason = (Verdict.LOST, "declared lost") if record.lost else _verdict(controller, record, now)
    return NodeView(
        node=record.hello.node,
        boot=record.hello.boot,
        address=record.hello.address,
        num_gpus=record.hello.num_gpus,
        connected=record.link is not None,
        verdict=verdict,
        reason=reason,
        silent_s=max(0.0, now - record.heard_at),
        ranks=record.ranks,
        memory_port=record.hello.memory_port,
        snoozed_until=0.0 if record.settles_at is None else time.time() + record.settles_at - now,
    )


def _verdict(controller: Controller, record: NodeRecord, now: float) -> tuple[Verdict, str]:
    node, ranks = record.hello.node, record.ranks
    complaint = controller.complaints.about(node, ranks) if record.ended_at is not None else None
    found = judge(now, record.contact, complaint=complaint)
    if found[0] is not Verdict.LOST:
        return found
    verdict, reason = judge(now, record.contact, controller.progress.stepping(node, ranks), complaint=complaint)
    excuse = controller.sight.excuses(node) if verdict is Verdict.LOST else ""
    return (Verdict.SUSPECT, f"{reason}, but {excuse}") if excuse else (verdict, reason)


def _suspect(controller: Controller, record: NodeRecord, reason: str) -> None:
    at = time.time()
    # Unique among the suspicions of this life of the node, also after a restart of the controller.
    record.suspected, record.suspicion = True, int(at * 1000)
    node, boot = record.hello.node, record.hello.boot
    log.info("node %s is suspect: %s", node, reason)
    controller.recorder.record(
        NodeSuspected(id=f"suspected/{node}/{boot}/{record.suspicion}", at=at, node=node, boot=boot, reason=reason)
    )


def _clear(controller: Controller, record: NodeRecord) -> None:
    record.suspected = False
    node, boot = record.hello.node, record.hello.boot
    suspicion = record.suspicion or int(time.time() * 1000)
    controller.recorder.record(NodeCleared(id=f"cleared/{node}/{boot}/{suspicion}", at=time.time(), node=node, boot=boot))


def _settle(controller: Controller, record: NodeRecord) -> None:
    record.settles_at = None
    node, boot = record.hello.node, record.hello.boot
    log.info("node %s has stayed for its whole snooze", node)
    controller.recorder.record(NodeSettled(id=f"settled/{node}/{boot}", at=time.time(), node=node, boot=boot))
