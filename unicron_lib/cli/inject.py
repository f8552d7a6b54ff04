"""`unicron inject`: harm a running cluster on purpose."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, cast

import typer

from unicron_lib.cli.faults import SPIKE_ITERATIONS
from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.cli.target import find_target
from unicron_lib.errors import AgentError, CommandTimeout, ControllerError, NodeNotConnected

if TYPE_CHECKING:
    from unicron_lib.agent.fault_messages import Fault
    from unicron_lib.cli.faults import Harm
    from unicron_lib.cli.target import Target

CUTS_THE_CONNECTION = frozenset({"node-loss", "partition"})
"""The connection may break before the answer has come over it."""
ANSWER_S = 10.0


def inject(
    kind: Annotated[
        str,
        typer.Argument(
            help="To a rank: crash, oom, exit, hang, slow, exception, nan, spike, corrupt. "
            "To a GPU: ecc, xid, nvlink, row-remap, gpu-lost. "
            "To a node: link-flap, probe-hang, node-loss, partition, spot-notice. "
            "To the object store: store-down."
        ),
    ],
    target: Annotated[str, typer.Argument(help="JOB/RANK, NODE/GPU, NODE, or nothing for store-down.")] = "",
    amount: Annotated[
        float | None,
        typer.Option(
            help="exit: its code (1); slow: how many times as long (2); xid: its number (79); "
            f"spike: iterations of a wrong gradient ({SPIKE_ITERATIONS:g}); "
            "probe-hang, partition, spot-notice, store-down: seconds (60, 30, 120, 10).",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(help='exception: what is raised, "TYPE: message", so that any kind of failure can be had.')
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Inject a fault into a rank, a GPU, a node or the store, journalled, so that the incident's clock has a zero."""
    from unicron_lib.cli.faults import STORE_DOWN, aim, amount_of, text_of
    from unicron_lib.domain.events import FaultInjected

    amount_of(kind, amount)  # a wrong word needs no cluster to be told
    said = text_of(kind, text)
    cluster = find_target()
    journal = cluster.journal()
    harm = aim(journal.refresh(), kind, target, amount)
    at = time.time()
    journal.append(FaultInjected(id=f"fault/{harm.victim}/{at:.6f}", at=at, kind=kind, target=harm.victim))
    if kind == STORE_DOWN:
        _take_store_away(cluster, harm)
    else:
        asyncio.run(_send(cluster, harm, at, said))
    if as_json:
        print_json({"fault": kind, "target": target, "node": harm.node or None, "amount": harm.amount or None, "at": at})
    else:
        say(f"{kind} done to {target or 'the store'}")


def _take_store_away(cluster: "Target", harm: "Harm") -> None:
    from unicron_lib.local.outage import take_away

    say(f"{cluster.store_url} is out of reach for {harm.amount:g} s")
    take_away(cluster.store_url, cluster.env, seconds=harm.amount)


async def _send(cluster: "Target", harm: "Harm", at: float, text: str) -> None:
    """Have the agent of the node do it. Raises AgentError if it refuses, ControllerError if it is out of reach."""
    from unicron_lib.agent.fault_messages import InjectFault

    command = InjectFault(
        step=f"inject/{at:.6f}",
        fault=cast("Fault", harm.kind),
        job=harm.job,
        rank=harm.rank,
        gpu=harm.gpu,
        amount=harm.amount,
        text=text,
    )
    async with cluster.client() as client:
        try:
            reply = await client.command(harm.node, command, timeout_s=ANSWER_S)
        except (NodeNotConnected, CommandTimeout):
            raise
        except ControllerError:
            if harm.kind in CUTS_THE_CONNECTION:
                return
            raise
    if not reply.ok:
        raise AgentError(f"{harm.node} refused: {reply.error}")
