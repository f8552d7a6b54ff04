"""Turn what agents observed into journalled failures: classify, journal, then tell Prefect, then acknowledge."""

import asyncio
import time

from prefect import task

from tasks.events import emit
from tasks.services import services
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import NodeNotice, Observation, RankResumed
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.detection.classify import classify
from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.events import Event, FailureDetected, JobFinished, JobResumed, NodeNoted
from unicron_lib.domain.failures import Failure
from unicron_lib.domain.incidents import incident_id
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.rank_done import RankDone


async def report(observation: Observation) -> str | None:
    """Journal what `observation` means; the id of the incident that it belongs to, if any.

    May run twice and in two processes: the journal takes each observation once, and it is acknowledged only then.
    """
    event = _event_of(observation)
    incident = await publish(event) if event else None
    if isinstance(event, RankDone):
        incident = await _finish_if_done(event)
    await services().controller.acknowledge([observation.id])
    return incident.id if incident else None


@task(name="report", task_run_name="{observation.body.type} on {observation.node}")
async def report_task(observation: Observation) -> str | None:
    """`report`, as a task run in the Prefect UI."""
    return await report(observation)


async def report_failure(failure: Failure) -> str | None:
    """Journal a failure that no agent reported, such as a stall; the id of its incident."""
    incident = await publish(FailureDetected(id=failure.id, at=time.time(), failure=failure))
    return incident.id if incident else None


async def publish(event: Event) -> Incident | None:
    """Journal `event` and tell Prefect; the open incident that it opened or joined."""
    journal = services().journal
    await asyncio.to_thread(journal.append, event)
    await emit(event, journal.state)
    return _incident_of(journal.state, event)


async def _finish_if_done(event: RankDone) -> Incident | None:
    """The job of a command is finished with the last of its ranks."""
    job = services().journal.state.jobs.get(event.job)
    if job is None or job.generation != event.generation or not job.is_done:
        return None
    done = f"finished/{event.job}/{event.generation}"
    iteration = max(event.iteration, job.iteration)
    return await publish(JobFinished(id=done, at=event.at, job=event.job, generation=event.generation, iteration=iteration))


def _event_of(observation: Observation) -> Event | None:
    now, name = time.time(), observation.id
    match observation.body:
        case RankFinished(whole_job=False) as body:
            job, generation, rank, iteration = body.job, body.generation, body.rank, body.iteration
            return RankDone(id=name, at=now, job=job, generation=generation, rank=rank, iteration=iteration)
        case RankFinished() as body:
            done = f"finished/{body.job}/{body.generation}"
            finished = JobFinished(id=done, at=now, job=body.job, generation=body.generation, iteration=body.iteration)
            return finished if body.rank == 0 else None
        case RankResumed() as body:
            return JobResumed(
                id=name, at=now, job=body.job, generation=body.generation, iteration=body.iteration, rank=body.rank
            )
        case NodeNotice() as body:
            node, boot = observation.node, observation.boot
            return NodeNoted(id=name, at=now, node=node, boot=boot, code=body.code, text=body.text, active=body.active)
        case NodeLeaving() as body:
            node, boot = observation.node, observation.boot
            return LeaveAnnounced(id=name, at=now, node=node, boot=boot, reason=body.reason, leaves_at=body.leaves_at)
        case _:
            failure = classify(observation)
            return FailureDetected(id=failure.id, at=now, failure=failure) if failure else None


def _incident_of(state: ClusterState, event: Event) -> Incident | None:
    if isinstance(event, FailureDetected):
        known = (i for i in state.open_incidents if any(f.id == event.failure.id for f in i.failures))
        return next(known, None)
    return state.incidents.get(incident_id(event.id))
