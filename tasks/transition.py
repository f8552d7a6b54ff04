"""The steps of a transition. Each may run twice, in two processes, and may die between any two lines.

A step's id is the key of its effect: agents answer a repeated step with the first answer, and the journal takes its
completion once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prefect import task

from tasks import memory
from tasks.sending import StepFailed, send, send_unless_gone
from tasks.services import services
from unicron_lib.agent.messages import (
    DrainRanks,
    HoldRanks,
    LaunchRanks,
    OpenRendezvous,
    Reply,
    SaveReplica,
    StopRanks,
)
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.controller.origins import origin_told
from unicron_lib.detection.sections import Limits
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Scalar, StepCompleted
from unicron_lib.domain.jobs import ENDED, JobSpec, JobState
from unicron_lib.domain.plans import Layout, Plan, Step, StepKind
from unicron_lib.domain.skipping import told
from unicron_lib.errors import ControllerError, UserError
from unicron_lib.planning.holding import iteration_of, memory_of, savers
from unicron_lib.planning.memory import may_begin_from_memory

log = logging.getLogger("unicron.transition")
Result = Mapping[str, Scalar]
OWN_CHECKPOINTS: Result = {"source": "its own checkpoints", "iteration": None, "manifest": None}
"""Where a job with a command goes on: that is its own business."""


@task(name="step", task_run_name="{step.kind} {step.job}", persist_result=True, result_serializer="json")
async def carry_out(plan: Plan, step: Step) -> Result:
    """Carry out one step and journal it; its result is what later steps need. Raises StepFailed."""
    result = await _EFFECTS[step.kind](plan, step)
    done = StepCompleted(id=step.id, at=time.time(), plan=plan.id, result=result)
    await asyncio.to_thread(services().journal.append, done)
    log.info("%s %s: %s", step.kind, step.job, ", ".join(f"{key} {value}" for key, value in result.items() if value))
    return result


async def _drain(plan: Plan, step: Step) -> Result:
    """Let the ranks stop with their work safe: in memory if they live on, else together at an iteration's end.

    If they can do neither, one survivor saves its replica. The work of a job that goes back is worth nothing: its ranks are
    merely stopped.
    """
    state = await asyncio.to_thread(services().journal.refresh)
    job = state.jobs[step.job]
    if job.rolled_back_to is not None:
        return {"source": "an earlier checkpoint", "iteration": None, "manifest": None}
    if job.spec.command and step.hold is None and _has_failed(state, plan, step.job):
        return OWN_CHECKPOINTS
    ranks = await _parted(step)
    if step.hold and (held := memory_of(step.hold, ranks, plan.assignment_of(step.job))):
        return held
    return OWN_CHECKPOINTS if job.spec.command else await _saved(step, ranks, _layouts(state, plan, step.job))


def _layouts(state: ClusterState, plan: Plan, job: str) -> dict[int, Layout]:
    """The layout of each generation that a plan has made, or makes."""
    known = (state.jobs[job].assignment, state.jobs[job].pending)
    made = (it.assignment_of(job) for it in (*(known.plan for known in state.plans.values()), plan))
    return {it.generation: it.layout for it in (*known, *made) if it}


async def _saved(step: Step, ranks: Sequence[Result], layouts: Mapping[int, Layout]) -> Result:
    """Where the work of drained and parked ranks is safe in the store."""
    saved = max((rank for rank in ranks if rank["state"] == "drained" and rank["manifest"]), key=iteration_of, default=None)
    parked = [
        rank for rank in ranks if rank["state"] == "parked" and (saved is None or iteration_of(rank) > iteration_of(saved))
    ]
    for first, *others in savers(parked, layouts):
        parts = await asyncio.gather(*(_save_replica(step, survivor) for survivor in others))
        if all(parts) and (result := await _save_replica(step, first)):
            return result
    if saved:
        return {"source": "drained", "iteration": saved["iteration"], "manifest": saved["manifest"]}
    return {"source": "the newest checkpoint", "iteration": None, "manifest": None}


async def _parted(step: Step) -> list[dict[str, Scalar]]:
    """What has become of the ranks that were asked to drain, or to wait."""
    deadline_s = services().settings.drain_s

    async def ask(node: str) -> list[dict[str, Scalar]]:
        reply = await send_unless_gone(node, _parting(step, node, deadline_s), timeout_s=deadline_s + 5)
        found = reply.result["ranks"] if reply else []
        assert isinstance(found, list)
        return [{**rank, "node": node} for rank in found]

    return [rank for found in await asyncio.gather(*map(ask, step.nodes)) for rank in found]


def _parting(step: Step, node: str, deadline_s: float) -> DrainRanks | HoldRanks:
    key, job, floor, hold = f"{step.id}/{node}", step.job, step.generation, step.hold
    if hold is None:
        return DrainRanks(step=key, job=job, below_generation=floor, deadline_s=deadline_s)
    return HoldRanks(
        step=key, job=job, below_generation=floor, deadline_s=deadline_s, abort=hold.abort, condemned=hold.condemned
    )


def _has_failed(state: ClusterState, plan: Plan, job: str) -> bool:
    """Whether the plan answers a failure of the job: a command's other ranks wait for the lost one, and save nothing."""
    answered = (state.incidents[name] for name in plan.incidents)
    return any(incident.is_failure and job in incident.jobs for incident in answered)


async def _save_replica(step: Step, survivor: Result) -> Result | None:
    """What a survivor has saved, None if it could not."""
    command = SaveReplica(
        step=f"{step.id}/save/{survivor['generation']}-{survivor['rank']}",
        job=step.job,
        generation=int(survivor["generation"] or 0),
        rank=int(survivor["rank"] or 0),
        as_generation=step.generation - 1,
        deadline_s=services().settings.command_s,
    )
    node = str(survivor["node"])
    try:
        reply = await send(node, command, timeout_s=command.deadline_s + 5)
    except StepFailed as error:
        log.warning("%s: the next survivor is asked", error)
        return None
    source = f"replica of rank {command.rank} at {node}"
    return {"source": source, "iteration": _scalar(reply, "iteration"), "manifest": _scalar(reply, "manifest")}


async def _stop(_plan: Plan, step: Step) -> Result:
    """End whatever is left of older generations, except what lives on; from here on their agents refuse them."""

    async def stop(node: str) -> int:
        command = StopRanks(
            step=f"{step.id}/{node}",
            job=step.job,
            below_generation=step.generation,
            grace_s=2.0,
            keep_gpus=step.hold.gpus_on(node) if step.hold else (),
        )
        reply = await send_unless_gone(node, command, timeout_s=services().settings.command_s)
        return int(_scalar(reply, "stopped") or 0) if reply else 0

    stopped = sum(await asyncio.gather(*map(stop, step.nodes)))
    if services().journal.state.jobs[step.job].status in ENDED:
        await memory.forget(step)
    return {"stopped": stopped}


async def _restore(plan: Plan, step: Step) -> Result:
    """Fence older generations off the store, then choose the newest complete checkpoint of this submission.

    For a job that goes back, checkpoints from after the harm was done are fenced off too. Where ranks hold newer state in their
    memory, or nodes in theirs, it is what they fall back on. Meanwhile the rendezvous store is started, which LAUNCH will
    ask for.
    """
    state = await asyncio.to_thread(services().journal.refresh)
    job = state.jobs[step.job]
    if job.spec.command:
        return OWN_CHECKPOINTS
    held = _held(plan, step.job)

    def choose() -> Result:
        repository = CheckpointRepository(services().store, step.job)
        _refuse_to_begin_anew(job, repository)
        anew = not job.restored and job.spec.load != "latest"
        counting = repository.fence(step.generation, anew=anew, up_to=job.rolled_back_to, forgets=not job.restored)
        newest, skipped = repository.newest_complete(counting, condemn=True)
        saved = newest.iteration if newest else -1
        result: dict[str, Scalar] = {"batches_left_out": told(job.skipped)} if job.skipped else {}
        result |= {"manifest": newest.key if newest else None, "iteration": saved, "skipped": "; ".join(skipped)}
        return result | ({"iteration": max(iteration_of(held), saved), "fallback_iteration": saved} if held else {})

    opening, forgetting = _open_rendezvous(plan, step.job, job.spec), memory.forget_strangers(step, job)
    chosen, opened, _ = await asyncio.gather(asyncio.to_thread(choose), opening, forgetting, return_exceptions=True)
    if isinstance(opened, BaseException):
        log.warning("%s: LAUNCH asks again", opened)
    if isinstance(chosen, BaseException):
        raise chosen
    return chosen if held or not may_begin_from_memory(job) else await memory.or_from_memory(state, plan, step, chosen)


async def _open_rendezvous(plan: Plan, job: str, spec: JobSpec) -> Reply:
    """Start the generation's rendezvous store beside its first rank, unless that is done. Raises StepFailed."""
    assignment = plan.assignment_of(job)
    assert assignment is not None
    launch = next(step for step in plan.steps if step.job == job and step.kind is StepKind.LAUNCH)
    command = OpenRendezvous(step=f"{launch.id}/rendezvous", job=job, generation=launch.generation, spec=spec)
    return await send(assignment.slots[0].node, command, timeout_s=services().settings.command_s)


def _refuse_to_begin_anew(job: JobState, repository: CheckpointRepository) -> None:
    """A job that goes back begins anew only if it had not come to its first save."""
    target = job.rolled_back_to
    if target is None or target + 1 < max(1, job.spec.save_interval):
        return
    oldest = min(repository.iterations(), default=-1)
    if oldest > target:
        raise UserError(
            f"{job.spec.job} must go back to iteration {target} or before, but its oldest checkpoint is of iteration "
            f"{oldest}: raise save_retain, or submit it anew"
        )


async def _launch(plan: Plan, step: Step) -> Result:
    """Start the generation's rendezvous store beside its first rank, then all its ranks."""
    assignment = plan.assignment_of(step.job)
    assert assignment is not None
    state = await asyncio.to_thread(services().journal.refresh)
    restored = _result_of(plan, step.job, StepKind.RESTORE)
    spec = state.jobs[step.job].spec
    opened, peers = await asyncio.gather(_open_rendezvous(plan, step.job, spec), memory.peers(state, assignment))
    manifest = restored.get("manifest")
    commands = [
        LaunchRanks(
            step=f"{step.id}/{node}",
            job=step.job,
            generation=step.generation,
            spec=spec,
            layout=assignment.layout,
            ranks=assignment.ranks_on(node),
            world_size=assignment.num_gpus,
            node_rank=node_rank,
            num_nodes=len(assignment.nodes),
            master_addr=str(_scalar(opened, "address")),
            master_port=int(_scalar(opened, "port") or 0),
            store_url=services().settings.store_url,
            restore_from=str(manifest) if manifest else None,
            skipped=state.jobs[step.job].skipped,
            memory=memory.place_of(restored),
            memory_layout=memory.layout_of(restored),
            memory_peers=peers.get(node, ()),
            mtbf_s=0.0 if spec.save_interval else services().mtbf_s(assignment.num_gpus),
        )
        for node_rank, node in enumerate(assignment.nodes)
    ]
    sends = (send(n, c, timeout_s=services().settings.command_s) for n, c in zip(assignment.nodes, commands, strict=True))
    await asyncio.gather(*sends)
    held, stored = _held(plan, step.job), str(manifest) if manifest else "the beginning"
    if spec.command:
        source = held.get("source", OWN_CHECKPOINTS["source"])
        return {"ranks": assignment.num_gpus, "from": source, "checkpoint": _scalar(opened, "checkpoint")}
    return {"ranks": assignment.num_gpus, "from": str(held["source"]) if held else str(restored.get("memory", stored))}


async def _resume(plan: Plan, step: Step) -> Result:
    """Wait for the first new iteration of every rank."""
    found = services()
    assignment = plan.assignment_of(step.job)
    assert assignment is not None
    spec = (await asyncio.to_thread(found.journal.refresh)).jobs[step.job].spec
    patience_s = first_iteration_s(spec, found.settings.first_iteration_s)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        state = await asyncio.to_thread(found.journal.refresh)
        job = state.jobs[step.job]
        if job.status in ENDED or step.generation < job.begins_with:
            return {"ended": True}
        try:
            live = await found.controller.job_progress(
                step.job, generation=step.generation, world_size=assignment.num_gpus, wait_s=2.0
            )
        except ControllerError:
            await asyncio.sleep(0.2)
            continue
        if live is not None and live.has_stepped(step.generation, assignment.num_gpus):
            restored, held = _result_of(plan, step.job, StepKind.RESTORE), _held(plan, step.job)
            stored = restored.get("fallback_iteration", restored.get("iteration"))
            in_memory = held.get("iteration", restored.get("iteration"))
            origin = origin_told(live.origins, held=in_memory, stored=stored)
            return {"iteration": live.iteration, "first_iteration_at": live.first_iteration_at, **origin}
    raise StepFailed(f"{step.job} made no iteration within {patience_s:.0f} s of its launch")


def first_iteration_s(spec: JobSpec, default_s: float) -> float:
    """How long a launched job's first iteration is waited for: by default, or as long as its own limit of `setup` allows."""
    return max(default_s, Limits.of(spec).start_s) if "setup" in spec.section_timeouts_s else default_s


_EFFECTS: Mapping[StepKind, Callable[[Plan, Step], Awaitable[Result]]] = {
    StepKind.DRAIN: _drain,
    StepKind.STOP: _stop,
    StepKind.RESTORE: _restore,
    StepKind.LAUNCH: _launch,
    StepKind.RESUME: _resume,
}


def _result_of(plan: Plan, job: str, kind: StepKind) -> Result:
    results = services().journal.state.plans[plan.id].results
    return next((results[s.id] for s in plan.steps if s.job == job and s.kind is kind and s.id in results), {})


def _held(plan: Plan, job: str) -> Result:
    """What DRAIN has found in the memory of ranks that live on; empty if there are none."""
    drained = _result_of(plan, job, StepKind.DRAIN)
    return drained if drained.get("held") else {}


def _scalar(reply: Reply, key: str) -> Scalar:
    value = reply.result.get(key)
    assert not isinstance(value, list)
    return value
