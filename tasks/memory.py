"""States in the memory of nodes, as the steps of a transition use them. Nothing here fails a step: there is the store."""

import asyncio
import logging
from collections.abc import Mapping

from tasks.services import services
from unicron_lib.agent.memory_messages import FetchMemory, FindMemory, ForgetMemory
from unicron_lib.agent.messages import Command, Reply
from unicron_lib.checkpointing.manifest import parse_key
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.slot_header import LARGEST
from unicron_lib.controller.views import NodeView
from unicron_lib.domain.cluster import ClusterState, NodeStatus
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.plans import Assignment, Layout, Plan, Step
from unicron_lib.errors import ControllerError
from unicron_lib.planning.memory import Fetch, HeldSlot, MemorySource, Place, choose, lacks_copies, peers_of

log = logging.getLogger("unicron.memory")
FIND_S = 30.0
SLOWEST_BYTES_S = 20e6
"""As the agents have it, who give a copy up that takes longer."""
MOST_OF_ONE = 2
"""So many states are fetched from a node at once: it gives and takes four, and lets others wait until they lose patience."""
Result = Mapping[str, Scalar]


async def or_from_memory(state: ClusterState, plan: Plan, step: Step, chosen: Result) -> Result:
    """What RESTORE has chosen in the store, unless memory of nodes has something further, or the same nearer."""
    assignment, manifest = plan.assignment_of(step.job), chosen["manifest"]
    assert assignment is not None
    floor = await asyncio.to_thread(CheckpointRepository(services().store, step.job).memory_from)
    iteration, generation = parse_key(step.job, str(manifest)) if manifest else (-1, -1)
    saved = (generation, iteration) if manifest else None
    source, skipped = await _find_source(state, step, assignment, floor=floor, saved=saved)
    result = {**chosen, "skipped": "; ".join(filter(None, (str(chosen["skipped"]), skipped)))}
    return result | {"fallback_iteration": iteration} | _told(source, assignment.layout) if source else result


async def _find_source(
    state: ClusterState, step: Step, assignment: Assignment, *, floor: int, saved: Place | None
) -> tuple[MemorySource | None, str]:
    """The state in memory that a generation begins from, brought to those who need it; and why others are not used."""
    views = await _nodes()
    replies = await asyncio.gather(*(_find(node, step) for node in views))
    told = (slot for node, reply in zip(views, replies, strict=True) for slot in _slots(node, reply))
    slots = [slot for slot in told if slot.place[0] < step.generation]  # none of this journal's can be later
    skipped = "; ".join(
        f"{node}: {reply.result['skipped']}" for node, reply in zip(views, replies, strict=True) if reply and _skips(reply)
    )
    racks = {name: node.rack for name, node in state.nodes.items()}
    source = choose(slots, assignment.homes, floor=floor, saved=saved, racks=racks)
    if source is not None and not await _all_fetched(step, source, views):
        return None, "; ".join(filter(None, (skipped, f"iteration {source.place[1]} could not be copied from its holders")))
    return source, skipped


def _told(source: MemorySource, layout: Layout) -> dict[str, Scalar]:
    """A source as RESTORE's result tells it, for a generation that goes on from it in `layout`."""
    copied = dict.fromkeys(f"memory of {fetch.holders[0]}, copied to {fetch.to}" for fetch in source.fetches)
    where = "; ".join((*([f"memory of {', '.join(source.on)}"] if source.on else []), *copied))
    kept_in = source.layout
    is_resharded = kept_in.shape != layout.shape
    return {
        "memory": f"{where}, resharded from {kept_in.shape}" if is_resharded else where,
        **({"memory_tp": kept_in.tp, "memory_pp": kept_in.pp} if is_resharded else {}),
        "memory_generation": source.place[0],
        "memory_bytes": source.num_bytes,
        "iteration": source.place[1],
    }


def place_of(restored: Result) -> Place | None:
    """The place that RESTORE has told of."""
    generation, iteration = restored.get("memory_generation"), restored.get("iteration")
    return None if generation is None or iteration is None else (int(generation), int(iteration))


def layout_of(restored: Result) -> Layout | None:
    """The layout that has kept the state of that place, if it is not the one that goes on from it."""
    tp, pp = restored.get("memory_tp"), restored.get("memory_pp")
    return None if tp is None or pp is None else Layout(tp=int(tp), pp=int(pp))


async def peers(state: ClusterState, assignment: Assignment) -> dict[str, tuple[str, ...]]:
    """Where nodes of an assignment send copies of what they keep in memory, `HOST:PORT`: all of them, or none."""
    if not lacks_copies(assignment.homes) or state.jobs[assignment.job].spec.memory_interval == 0:
        return {}
    views = {name: view for name, view in (await _nodes()).items() if _is_ready(state, name)}
    racks = {name: node.rack for name, node in state.nodes.items()}
    found = {home: peers_of(assignment.job, home, views, racks, busy=assignment.nodes) for home in assignment.nodes}
    return {home: tuple(_address(views[name]) for name in names) for home, names in found.items()}


async def forget(step: Step, *, below_generation: int | None = None) -> None:
    """Nobody needs the job's states of generations before this one any more, or of those below another one."""
    floor = step.generation if below_generation is None else below_generation
    commands = (
        (node, ForgetMemory(step=f"{step.id}/forget/{node}", job=step.job, below_generation=floor)) for node in await _nodes()
    )
    await asyncio.gather(*(_ask(node, command, services().settings.command_s) for node, command in commands))


async def forget_strangers(step: Step, job: JobState) -> None:
    """Before a submission's first ranks: whatever has the job's name in memory, of whatever generation, is not its own.

    Agents that were killed leave their slots behind, also when the journal that knew of them was removed.
    """
    if not job.restored and job.spec.memory_interval != 0:
        await forget(step, below_generation=LARGEST + 1)


async def _find(node: str, step: Step) -> Reply | None:
    return await _ask(node, FindMemory(step=f"{step.id}/find/{node}", job=step.job), FIND_S)


async def _all_fetched(step: Step, source: MemorySource, views: Mapping[str, NodeView]) -> bool:
    turns = {fetch.holders[0]: asyncio.Semaphore(MOST_OF_ONE) for fetch in source.fetches}

    async def in_turn(fetch: Fetch) -> bool:
        async with turns[fetch.holders[0]]:
            return await _fetched(step, source, fetch, views)

    return all(await asyncio.gather(*map(in_turn, source.fetches)))


async def _fetched(step: Step, source: MemorySource, fetch: Fetch, views: Mapping[str, NodeView]) -> bool:
    command = FetchMemory(
        step=f"{step.id}/fetch/{fetch.to}{fetch.part and '/'}{fetch.part}",
        job=step.job,
        generation=step.generation,
        slot_generation=source.place[0],
        iteration=source.place[1],
        part=fetch.part,
        holders=tuple(_address(views[holder]) for holder in fetch.holders),
    )
    return await _ask(fetch.to, command, FIND_S + len(fetch.holders) * source.num_bytes / SLOWEST_BYTES_S) is not None


async def _ask(node: str, command: Command, timeout_s: float) -> Reply | None:
    """The node's answer; None, with a line in the log, if there is none that helps."""
    try:
        reply = await services().controller.command(node, command, timeout_s=timeout_s)
    except ControllerError as error:
        log.warning("%s of %s is not asked for: %s", command.type, node, error)
        return None
    if not reply.ok:
        log.warning("%s refused %s: %s", node, command.type, reply.error)
    return reply if reply.ok else None


async def _nodes() -> dict[str, NodeView]:
    """The nodes that can be asked."""
    try:
        views = await services().controller.nodes()
        return {view.node: view for view in views if view.connected and view.verdict == "alive" and view.memory_port}
    except ControllerError as error:
        log.warning("no node is asked for what is in its memory: %s", error)
        return {}


def _slots(node: str, reply: Reply | None) -> list[HeldSlot]:
    found = reply.result.get("slots", []) if reply else []
    assert isinstance(found, list)
    return [_slot(node, it) for it in found]


def _slot(node: str, told: Result) -> HeldSlot:
    place = int(told["generation"] or 0), int(told["iteration"] or 0)
    return HeldSlot(node=node, place=place, num_bytes=int(told["num_bytes"] or 0), part=str(told.get("part") or ""))


def _skips(reply: Reply) -> bool:
    return bool(reply.result.get("skipped"))


def _is_ready(state: ClusterState, node: str) -> bool:
    return node in state.nodes and state.nodes[node].status is NodeStatus.READY


def _address(view: NodeView) -> str:
    return f"{view.address}:{view.memory_port}"
