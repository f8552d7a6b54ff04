"""Every fault that can be injected happens on a real agent, and arrives as the observation that it should be."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from local_cluster import LocalCluster, eventually

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import (
    GpuFault,
    NodeNotice,
    NodeUnreachable,
    Observation,
    RankExited,
    RankStalled,
    StopRanks,
)
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.local.bench_rank import BENCH, grid_iteration

PACE_S = 0.05
WARM = 24
NODE = "workshop"
RANKS = ("--rank-target", "unicron_lib.local.bench_rank:main", "--kernel-log", "none")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    """With a node for the jobs of all tests, one after the other."""
    shared_cluster.start_agent(NODE, *RANKS)
    await shared_cluster.node(NODE)
    return shared_cluster


@asynccontextmanager
async def training(cluster: LocalCluster, job: str) -> AsyncIterator[None]:
    """A job of two ranks, once both have a pace."""
    spec = JobSpec(job=job, data_path=BENCH, pace_s=PACE_S)
    await cluster.launch(node=NODE, job=job, step=f"launch-{job}", spec=spec)
    target = grid_iteration(PACE_S) + WARM

    async def warm() -> bool:
        progress = await cluster.client.job_progress(job)
        return progress is not None and sum(at >= target for at in progress.iterations.values()) == 2

    await eventually(warm, f"{WARM} iterations of {job}")
    yield
    stopping = StopRanks(step=f"stop-{job}", job=job, below_generation=2, grace_s=1.0)
    assert (await cluster.client.command(NODE, stopping)).ok


async def inject(cluster: LocalCluster, node: str, fault: str, **more: object) -> None:
    command = InjectFault(**{"step": f"inject-{node}-{fault}", "fault": fault, **more})
    reply = await cluster.client.command(node, command)
    assert reply.ok, reply.error


async def observed(cluster: LocalCluster, node: str, body: type, *, job: str | None = None) -> Observation:
    async def ask() -> Observation | None:
        waiting = await cluster.client.observations(job=job, wait_s=1.0)
        return next((it for it in waiting if it.node == node and isinstance(it.body, body)), None)

    return await eventually(ask, f"{body.__name__} of {node}")


@pytest.mark.parametrize(
    ("fault", "body", "kinds"),
    [
        ("crash", RankExited, {ErrorKind.PROCESS_EXIT}),
        ("oom", RankExited, {ErrorKind.OUT_OF_MEMORY}),
        # stopped while it waits for others, which these ranks do half of the time, it looks like those that wait for it
        ("hang", RankStalled, {ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT}),
        ("exception", RankFailed, {ErrorKind.OTHER}),
    ],
)
async def test_a_fault_of_a_rank(cluster: LocalCluster, fault: str, body: type, kinds: set[ErrorKind]) -> None:
    job = f"job-{fault}"
    async with training(cluster, job):
        await inject(cluster, NODE, fault, job=job, rank=1)
        seen = await observed(cluster, NODE, body, job=job)
    failure = classify(seen)
    assert failure is not None
    assert (failure.job, failure.rank, failure.generation) == (job, 1, 1)
    assert failure.kind in kinds


@pytest.mark.parametrize(
    ("code", "kind", "verdict"),
    [
        (16, ErrorKind.CUDA_ERROR, "exclude"),
        (17, ErrorKind.CUDA_ERROR, "exclude_and_stop"),
        (93, ErrorKind.USER_ERROR, "stop"),
        (1, ErrorKind.PROCESS_EXIT, ""),
    ],
)
async def test_a_rank_that_ends_with_a_code(cluster: LocalCluster, code: int, kind: ErrorKind, verdict: str) -> None:
    job = f"job-exit-{code}"
    async with training(cluster, job):
        await inject(cluster, NODE, "exit", step=f"exit-{code}", job=job, rank=1, amount=float(code))
        seen = await observed(cluster, NODE, RankExited, job=job)
    assert isinstance(seen.body, RankExited)
    assert (seen.body.rank, seen.body.exit_code) == (1, code)
    failure = classify(seen)
    assert failure is not None
    assert (failure.kind, failure.verdict) == (kind, verdict)


async def test_a_slow_rank(cluster: LocalCluster) -> None:
    async def slower() -> bool:
        progress = await cluster.client.job_progress("job-slow")
        window = progress.window if progress else None
        return window is not None and window.compute_s[1] > 1.3 * window.compute_s[0]

    async with training(cluster, "job-slow"):
        await inject(cluster, NODE, "slow", job="job-slow", rank=1, amount=1.5)
        await eventually(slower, "a window in which rank 1 is slow")


@pytest.mark.parametrize(
    ("fault", "kind", "xid"),
    [
        ("ecc", ErrorKind.ECC_ERROR, None),
        ("xid", ErrorKind.GPU_LOST, 79),
        ("nvlink", ErrorKind.NVLINK_ERROR, None),
        ("row-remap", ErrorKind.ECC_ERROR, None),
        ("gpu-lost", ErrorKind.GPU_LOST, None),
    ],
)
async def test_a_fault_of_a_gpu(shared_cluster: LocalCluster, fault: str, kind: ErrorKind, xid: int | None) -> None:
    node = f"node-{fault}"
    shared_cluster.start_agent(node, *RANKS)
    await shared_cluster.node(node)
    await inject(shared_cluster, node, fault, gpu=1, amount=79.0)
    seen = await observed(shared_cluster, node, GpuFault)
    assert isinstance(seen.body, GpuFault)
    assert (seen.body.gpu, seen.body.xid) == (1, xid)
    failure = classify(seen)
    assert failure is not None
    assert (failure.kind, failure.node) == (kind, node)


async def test_a_link_that_flaps(shared_cluster: LocalCluster) -> None:
    """Each time, as it is another port's."""
    node = "node-link-flap"
    shared_cluster.start_agent(node, *RANKS)
    await shared_cluster.node(node)
    for port in ("injected1", "injected2"):
        await inject(shared_cluster, node, "link-flap", step=port)
        seen = await observed(shared_cluster, node, GpuFault)
        failure = classify(seen)
        assert failure is not None
        assert (failure.kind, failure.node) == (ErrorKind.LINK_FLAPPING, node)
        assert port in failure.evidence
        await shared_cluster.client.acknowledge([seen.id])


async def test_a_probe_that_hangs(shared_cluster: LocalCluster) -> None:
    """PB05: the monitoring is lost, the node is not; it needs no driver."""
    node = "node-probe-hang"
    shared_cluster.start_agent(node, *RANKS)
    await shared_cluster.node(node)
    await inject(shared_cluster, node, "probe-hang", amount=3600.0)
    seen = await observed(shared_cluster, node, NodeNotice)
    assert isinstance(seen.body, NodeNotice)
    assert (seen.body.code, seen.body.active) == ("gpu_probe_hung", True)
    assert classify(seen) is None
    assert (await shared_cluster.node(node)).connected


@pytest.mark.parametrize("fault", ["node-loss", "partition"])
async def test_a_fault_of_a_node(shared_cluster: LocalCluster, fault: str) -> None:
    """The journal's word for it is the same, the reason tells them apart: a closed connection, or silence."""
    node = f"node-{fault}"
    agent = shared_cluster.start_agent(node, *RANKS)
    await shared_cluster.node(node)
    await inject(shared_cluster, node, fault, amount=60.0)
    seen = await observed(shared_cluster, node, NodeUnreachable)
    failure = classify(seen)
    assert failure is not None
    assert (failure.kind, failure.node) == (ErrorKind.NODE_LOST, node)
    assert (agent.poll() is None) == (fault == "partition")


async def test_what_cannot_be_done_is_refused(shared_cluster: LocalCluster) -> None:
    nobody = InjectFault(step="nobody", fault="crash", job="nobody", rank=0)
    no_gpu = InjectFault(step="no-gpu", fault="ecc", gpu=7)
    for command in (nobody, no_gpu):
        reply = await shared_cluster.client.command("n0", command)
        assert not reply.ok
        assert "n0" in reply.error
