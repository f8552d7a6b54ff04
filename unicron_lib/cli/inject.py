"""`unicron inject`: harm a running cluster on purpose."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.cli.target import find_target
from unicron_lib.errors import ControllerError, UserError

if TYPE_CHECKING:
    from unicron_lib.domain.cluster import ClusterState

Fault = Literal["crash", "hang", "exception", "nan", "node-loss"]


def inject(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(get_args(Fault))}.")],
    target: Annotated[str, typer.Argument(help="JOB/RANK, or a node for node-loss.")],
    as_json: AsJson = False,
) -> None:
    """Inject a fault into a rank or a node, journalled, so that the incident's clock has a zero."""
    from unicron_lib.agent.messages import InjectFault
    from unicron_lib.domain.events import FaultInjected

    if kind not in get_args(Fault):
        raise UserError(f"unknown fault {kind!r}: choose one of {', '.join(get_args(Fault))}")
    cluster = find_target()
    journal = cluster.journal()
    node, job, rank = locate(journal.refresh(), kind, target)
    at = time.time()
    journal.append(FaultInjected(id=f"fault/{target}/{at:.6f}", at=at, kind=kind, target=target))
    command = InjectFault(step=f"inject/{at:.6f}", fault=cast("Fault", kind), job=job, rank=rank)

    async def send() -> None:
        async with cluster.client() as client:
            try:
                await client.command(node, command, timeout_s=10)
            except ControllerError:
                if kind != "node-loss":  # a lost node does not answer
                    raise

    asyncio.run(send())
    print_json({"fault": kind, "target": target, "node": node, "at": at}) if as_json else say(f"{kind} done to {target}")


def locate(state: "ClusterState", kind: str, target: str) -> tuple[str, str, int]:
    """The node, job and rank that `target` names. Raises UserError if there is no such thing."""
    if kind == "node-loss":
        if target not in state.nodes:
            raise UserError(f"no node {target!r}: there are {', '.join(sorted(state.nodes)) or 'none'}")
        return target, "", 0
    name, _, number = target.partition("/")
    job = state.jobs.get(name)
    if job is None or job.assignment is None:
        raise UserError(f"no running job {name!r}: give JOB/RANK, see `unicron jobs`")
    if not number.isdigit() or int(number) >= job.assignment.num_gpus:
        raise UserError(f"{name} has ranks 0 to {job.assignment.num_gpus - 1}: give JOB/RANK, found {target!r}")
    return job.assignment.slots[int(number)].node, name, int(number)
