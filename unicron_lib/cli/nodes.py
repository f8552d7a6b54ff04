"""`unicron nodes`: the nodes and how they are, the end of a quarantine, and the breaker."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.check import show_check
from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.cli.target import Target, find_target
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from unicron_lib.domain.cluster import ClusterState, Node


def nodes(
    release: Annotated[str, typer.Option(metavar="NODE", help="End the quarantine of NODE: it may get ranks again.")] = "",
    reset_breaker: Annotated[
        bool, typer.Option("--reset-breaker", help="After too many isolations at once: nodes may be isolated again.")
    ] = False,
    false_alarm: Annotated[
        bool, typer.Option("--false-alarm", help="With --reset-breaker: the nodes that it held back are left alone.")
    ] = False,
    quarantine: Annotated[str, typer.Option(metavar="NODE", help="Isolate NODE: its jobs leave it, until --release.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, with --quarantine.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check the named nodes, or all idle ones: isolate the faulty, release the cleared.")
    ] = False,
    named: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="Those to check, with --check.")] = None,
    as_json: AsJson = False,
) -> None:
    """The nodes and how they are; with --release, take a repaired one back; with --check, find the faulty ones."""
    from unicron_lib.cli.look import node_rows, nodes_table, print_tables, read_state

    if named and not check:
        raise UserError(f"what about {', '.join(named)}? `unicron nodes --check NODE...` checks nodes")
    target = find_target()
    if check:
        show_check(target, named or [], as_json=as_json)
        return
    if release:
        _release(target, release)
        print_json({"node": release, "status": "ready"}) if as_json else say(f"{release} may get ranks again")
        return
    if quarantine:
        _quarantine(target, quarantine, reason)
        print_json({"node": quarantine, "status": "quarantined"}) if as_json else say(f"{quarantine} gets no ranks any more")
        return
    if reset_breaker:
        _reset_breaker(target, false_alarm=false_alarm)
        print_json({"breaker_since": None}) if as_json else say("nodes may be isolated again")
        return
    state = read_state(target)
    print_json({"nodes": node_rows(state)}) if as_json else print_tables(nodes_table(state))


def _quarantine(target: Target, name: str, reason: str) -> None:
    from unicron_lib.domain.cluster import BY_HAND, NodeStatus
    from unicron_lib.domain.events import NodeQuarantined

    journal = target.journal()
    node = known(journal.refresh(), name)
    if not reason:
        raise UserError(f"why is {name} to be isolated? Say so for those who find it so: --reason TEXT")
    if node.status in {NodeStatus.LOST, NodeStatus.QUARANTINED}:
        raise UserError(f"{name} is {node.status} already: {node.reason}")
    at = time.time()
    told = f"{BY_HAND}: {reason}"
    journal.append(NodeQuarantined(id=f"quarantined/{name}/{node.boot}/{at:.3f}", at=at, node=name, reason=told))


def _reset_breaker(target: Target, *, false_alarm: bool = False) -> None:
    from unicron_lib.domain.events import BreakerReset

    journal = target.journal()
    since = journal.refresh().breaker_since
    if since is None:
        raise UserError("the breaker has not tripped: nodes are isolated as their failures ask for it")
    journal.append(BreakerReset(id=f"breaker-reset/{since:.3f}", at=time.time(), false_alarm=false_alarm))


def _release(target: Target, name: str) -> None:
    from unicron_lib.domain.events import NodeReleased

    journal = target.journal()
    node = quarantined(journal.refresh(), name)
    if name not in asyncio.run(_connected(target)):
        raise UserError(f"the agent of {name} has no connection to the controller: start it, then release the node")
    at = time.time()
    journal.append(NodeReleased(id=f"released/{name}/{node.boot}/{at:.3f}", at=at, node=name))


def known(state: "ClusterState", name: str) -> "Node":
    """The node `name`. Raises UserError if there is none."""
    if name not in state.nodes:
        raise UserError(f"no node {name!r}: there are {', '.join(sorted(state.nodes)) or 'none'}")
    return state.nodes[name]


def quarantined(state: "ClusterState", name: str) -> "Node":
    """The node `name`. Raises UserError if there is none or it is neither in quarantine nor snoozed."""
    from unicron_lib.domain.cluster import NodeStatus

    node = known(state, name)
    kept_out = {NodeStatus.QUARANTINED, NodeStatus.SNOOZED}
    if node.status not in kept_out:
        held = ", ".join(sorted(it.id for it in state.nodes.values() if it.status in kept_out)) or "none"
        raise UserError(f"{name} is {node.status}, not quarantined: in quarantine are {held}")
    return node


async def _connected(target: Target) -> frozenset[str]:
    async with target.client() as client:
        return frozenset(view.node for view in await client.nodes() if view.connected)
