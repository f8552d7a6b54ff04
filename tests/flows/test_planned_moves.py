"""PB21: what other jobs' failures do to a job is no failure of its own."""

import time

from scenes import TABLE

from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.events import FailureDetected, JobSubmitted, NodeJoined
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec, JobStatus

ROUNDS = 5


def lose(site, node, boot):
    failure = Failure(
        id=f"lost/{node}/{boot}",
        kind=ErrorKind.NODE_LOST,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=time.time(),
        node=node,
        boot=boot,
        evidence="silent",
    )
    site.journal.append(FailureDetected(id=failure.id, at=time.time(), failure=failure))


def join(site, node, boot):
    site.journal.append(NodeJoined(id=f"join/{node}/{boot}", at=time.time(), node=node, boot=boot, address="a", num_gpus=2))


async def test_moves_for_the_sake_of_other_jobs_never_count_as_restarts(site):
    """A heavy job loses and regains nodes, which the real planner takes from and gives back to a light one."""
    await two_jobs(site)
    moves = 0
    for number in range(ROUNDS):
        state = site.journal.refresh()
        before = state.jobs["gpt-a"].generation
        victim = min(state.jobs["heavy"].nodes - state.jobs["gpt-a"].nodes)
        lose(site, victim, state.nodes[victim].boot)
        await site.respond()
        join(site, victim, f"again-{number}")
        await site.respond()
        moves += site.journal.state.jobs["gpt-a"].generation - before
        assert site.journal.state.jobs["gpt-a"].status is JobStatus.RUNNING
    assert moves >= ROUNDS, "the planner moved it"
    job = site.journal.state.jobs["gpt-a"]
    assert job.generation > job.spec.max_restarts + 1
    assert job.stuck_restarts == 0
    await the_whole_budget_is_left(site)


async def the_whole_budget_is_left(site):
    """So many failures in a row are survived, one more is not."""
    budget = site.journal.state.jobs["gpt-a"].spec.max_restarts
    for number in range(budget + 1):
        assert site.journal.state.jobs["gpt-a"].status is JobStatus.RUNNING
        site.fail(f"own-{number}", kind=ErrorKind.OUT_OF_MEMORY)
        await site.respond()
    site.fail("one-too-many", kind=ErrorKind.OUT_OF_MEMORY)
    await site.respond()
    assert site.journal.state.jobs["gpt-a"].status is JobStatus.FAILED
    assert {it.status for it in site.journal.state.incidents.values()} <= {IncidentStatus.CLOSED, IncidentStatus.MERGED}


async def two_jobs(site):
    """The light job of the site and a heavy one on four nodes."""
    for number in (3, 4):
        join(site, f"node-{number}", "b")
    spec = JobSpec(job="heavy", weight=10.0, min_gpus=4, max_gpus=4, throughput_flops=TABLE)
    site.journal.append(JobSubmitted(id="s-heavy", at=time.time(), submission="2", spec=spec))
    await site.respond()
    sizes = {name: job.gpus for name, job in site.journal.state.jobs.items()}
    assert sizes == {"gpt-a": 4, "heavy": 4}
