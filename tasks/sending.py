"""Commands to the agents of nodes, for the steps of a transition."""

import asyncio
import logging

from tasks.services import services
from unicron_lib.agent.messages import Command, Reply
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.errors import CommandTimeout, ControllerError, NodeNotConnected, UnicronError

log = logging.getLogger("unicron.transition")


class StepFailed(UnicronError):
    """A step could not have its effect: one sentence why, and the node that did not play along."""

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


async def send_unless_gone(node: str, command: Command, *, timeout_s: float) -> Reply | None:
    """Like `send`, but None if the node is lost or isolated: then it need not play along."""
    try:
        return await send(node, command, timeout_s=timeout_s)
    except StepFailed as error:
        if await _is_out(node):
            log.warning("%s: nothing more is asked of it", error)
            return None
        raise


async def send(node: str, command: Command, *, timeout_s: float) -> Reply:
    """The agent's answer, however long the controller is away. Raises StepFailed if there is none or it is no."""
    while True:
        try:
            reply = await services().controller.command(node, command, timeout_s=timeout_s)
            break
        except ControllerError as error:
            if isinstance(error, CommandTimeout) or (isinstance(error, NodeNotConnected) and await _stays_away(node)):
                raise StepFailed(f"{node} did not answer {command.type} for {command.job}: {error}", node) from error
            log.info("%s for %s waits: %s", command.type, command.job, error)
            await asyncio.sleep(0.2)
    if not reply.ok:
        raise StepFailed(f"{node} refused {command.type} for {command.job}: {reply.error}", node)
    return reply


async def _is_out(node: str) -> bool:
    """Whether nothing more needs to be asked of it: it is gone, or isolated."""
    state = await asyncio.to_thread(services().journal.refresh)
    return node not in state.nodes or state.nodes[node].status not in {NodeStatus.READY, NodeStatus.SUSPECT}


async def _stays_away(node: str) -> bool:
    """Whether a node without a connection will not come back. An isolated one may, and its ranks are still to be stopped."""
    if not await _is_out(node):
        return False
    known = services().journal.state.nodes.get(node)
    if known is None or known.status is NodeStatus.LOST:
        return True
    try:
        views = {view.node: view for view in await services().controller.nodes()}
    except ControllerError:
        return False
    return node not in views or views[node].verdict == "lost"
