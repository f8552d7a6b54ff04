"""Ranks under a real agent and a real controller."""

import asyncio
import math
import os
import signal
import time

import psutil
import pytest
from local_cluster import LocalCluster, descendants, eventually, launch, pids

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.inquiries import ReadLog
from unicron_lib.agent.messages import DrainRanks, OpenRendezvous, RankExited, SaveReplica, StopRanks
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.diagnosis.tails import Tail

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job of the test's own: the cluster is shared."""
    return f"job-{abs(hash(request.node.name)) % 10**8}"


async def stepped(cluster: LocalCluster, job: str, generation: int = 1) -> None:
    seen = await cluster.client.job_progress(job, generation=generation, world_size=2, wait_s=10)
    assert seen is not None
    assert seen.has_stepped(generation, 2)


async def no_ranks(cluster: LocalCluster, job: str) -> None:
    async def ask() -> bool:
        return all(rank.job != job for rank in (await cluster.node()).ranks)

    await eventually(ask, f"no rank of {job} is left")


def stop(job: str, below: int, grace_s: float = 5.0) -> StopRanks:
    return StopRanks(step=f"stop-{job}-{below}", job=job, below_generation=below, grace_s=grace_s)


async def test_ranks_start_and_step(cluster: LocalCluster, job: str) -> None:
    await cluster.launch(job=job)
    await stepped(cluster, job)
    seen = await cluster.client.job_progress(job)
    assert seen is not None
    assert set(seen.iterations) == {0, 1}
    assert seen.measured_flops == {2: 2e9}
    assert await cluster.client.job_progress("unknown") is None
    assert job in [view.job for view in await cluster.client.progress()]
    log = (cluster.directory / "run/logs" / job / "g1-r0.log").read_text()
    assert "hello from" in log


async def test_a_killed_rank_is_reported(cluster: LocalCluster, job: str) -> None:
    reply = await cluster.launch(job=job)
    await stepped(cluster, job)
    began = time.monotonic()
    assert (await cluster.client.command("n0", InjectFault(step=f"{job}-x", fault="crash", job=job, rank=1))).ok
    seen = await cluster.observation("rank_exited", job)
    print(f"seen {1000 * (time.monotonic() - began):.1f} ms after the injection was asked for")  # noqa: T201
    assert isinstance(seen.body, RankExited)
    assert (seen.body.rank, seen.body.exit_code, seen.body.pid) == (1, -9, pids(reply)[1])
    assert seen.body.iteration >= 0


async def test_an_exit_code_is_passed_on_unchanged(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("exit16", ranks=1, job=job)
    seen = await cluster.observation("rank_exited", job)
    assert isinstance(seen.body, RankExited)
    assert seen.body.exit_code == 16


async def test_a_rank_that_fails_at_once_is_one_observation(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("fail", ranks=1, job=job)
    seen = await cluster.observation("rank_failed", job)
    assert isinstance(seen.body, RankFailed)
    assert not seen.body.parked
    assert len(seen.body.message) < 40_000
    await no_ranks(cluster, job)
    assert [observation.id for observation in await cluster.client.observations(job=job)] == [seen.id]


async def test_a_rank_that_finishes_is_one_observation(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("finish", ranks=1, job=job)
    seen = await cluster.observation("rank_finished", job)
    await no_ranks(cluster, job)
    assert [observation.id for observation in await cluster.client.observations(job=job)] == [seen.id]
    assert await cluster.client.observations(job="another") == ()
    assert await cluster.client.observations(job=job, min_age_s=60) == ()
    told = await cluster.client.acknowledged()
    news = asyncio.create_task(cluster.client.acknowledged(told, wait_s=30))
    assert await cluster.client.acknowledge([seen.id, "unknown"]) == 1
    assert await news == told + 1, "who waits for what is journalled hears of it"
    assert await cluster.client.observations(job=job) == ()


async def test_the_log_of_a_rank_that_is_gone_can_still_be_read(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("finish", ranks=1, job=job)
    await cluster.observation("rank_finished", job)
    await no_ranks(cluster, job)
    await cluster.client.command("n0", StopRanks(step=f"{job}-stop", job=job, below_generation=9, grace_s=1.0))
    reply = await cluster.client.command("n0", ReadLog(step=f"{job}-l1", job=job, generation=1, rank=0))
    tail = Tail(file=str(reply.result["file"]), packed=str(reply.result["packed"]), first_line=reply.result["first_line"])
    assert tail.file.endswith(f"logs/{job}/g1-r0.log")
    assert tail.first_line == 1
    assert b"hello from" in tail.unpacked(), "whatever generation is the newest"


@pytest.mark.parametrize(("name", "told"), [("unheard-of", "cannot be read: No such file"), ("../etc", "is no job's name")])
async def test_a_log_that_is_not_there_is_refused_in_one_sentence(cluster: LocalCluster, name: str, told: str) -> None:
    reply = await cluster.client.command("n0", ReadLog(step=f"log-{name}", job=name, generation=1, rank=0))
    assert not reply.ok
    assert told in reply.error


async def test_an_exception_and_a_nan_are_injected(cluster: LocalCluster, job: str) -> None:
    await cluster.launch(job=job)
    await stepped(cluster, job)
    assert (await cluster.client.command("n0", InjectFault(step=f"{job}-x1", fault="exception", job=job, rank=0))).ok
    assert (await cluster.observation("rank_failed", job)).body.rank == 0
    assert (await cluster.client.command("n0", InjectFault(step=f"{job}-x2", fault="nan", job=job, rank=1))).ok

    async def nan() -> bool:
        seen = await cluster.client.job_progress(job)
        return seen is not None and math.isnan(seen.loss)

    await eventually(nan, "a NaN arrives as NaN")
    refused = await cluster.client.command("n0", InjectFault(step=f"{job}-x3", fault="crash", job=job, rank=7))
    assert not refused.ok
    assert "does not run" in refused.error


async def test_drain_tells_what_became_of_each_rank(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("step", generation=1, job=job)
    await stepped(cluster, job)
    drain = DrainRanks(step=f"{job}-d1", job=job, below_generation=2, deadline_s=10)
    reply = await cluster.client.command("n0", drain)
    ranks = reply.result["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["rank"], rank["generation"], rank["state"]) for rank in ranks] == [(0, 1, "drained"), (1, 1, "drained")]
    assert all(rank["manifest"] == f"manifest-{rank['iteration']}" for rank in ranks)
    await no_ranks(cluster, job)
    again = await cluster.client.command("n0", DrainRanks(step=f"{job}-d2", job=job, below_generation=2, deadline_s=10))
    assert again.result == reply.result
    assert await cluster.client.observations(job=job) == ()


async def test_drain_does_not_wait_for_the_parked_the_dead_and_the_hung(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("park", ranks=1, generation=1, job=job)
    await cluster.launch("exit16", ranks=1, generation=2, job=job)
    await cluster.launch("step", ranks=1, generation=3, job=job)
    await cluster.client.job_progress(job, generation=3, world_size=1, wait_s=10)
    await cluster.observation("rank_exited", job)
    await cluster.observation("rank_failed", job)
    hung = await cluster.client.command("n0", InjectFault(step=f"{job}-x", fault="hang", job=job, rank=0))
    process = psutil.Process(int(str(hung.result["pid"])))

    async def is_stopped() -> bool:
        return process.status() == psutil.STATUS_STOPPED

    await eventually(is_stopped, "the rank is stopped")
    reply = await cluster.client.command("n0", DrainRanks(step=f"{job}-d", job=job, below_generation=4, deadline_s=0.3))
    ranks = reply.result["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["generation"], rank["state"]) for rank in ranks] == [(1, "parked"), (2, "gone"), (3, "busy")]
    stopped = await cluster.client.command("n0", stop(job, 4))
    assert stopped.result == {"stopped": 2}


async def test_what_a_newer_plan_has_parted_from_is_not_launched_any_more(cluster: LocalCluster, job: str) -> None:
    """What the older ranks have saved is counted on: later ones, of a plan that was given up, would go on behind that."""
    drained = await cluster.client.command("n0", DrainRanks(step=f"{job}-d", job=job, below_generation=3, deadline_s=1))
    assert drained.ok
    late = await cluster.client.command("n0", launch("step", job=job, generation=2))
    assert (late.ok, late.stale) == (False, True)
    assert (await cluster.client.command("n0", launch("step", job=job, generation=3))).ok
    await cluster.client.command("n0", stop(job, 4))


async def test_a_parked_rank_saves_its_replica_and_quits(cluster: LocalCluster, job: str) -> None:
    reply = await cluster.launch("park", ranks=2, job=job)
    await cluster.observation("rank_failed", job)
    save = SaveReplica(step=f"{job}-s", job=job, generation=1, rank=0, deadline_s=10)
    saved = await cluster.client.command("n0", save)
    assert saved.result == {"iteration": 0, "manifest": "manifest-replica"}
    empty = SaveReplica(step=f"{job}-s1", job=job, generation=1, rank=1, deadline_s=250)

    async def has_answered() -> bool:
        return "has no state" in (await cluster.client.command("n0", empty)).error

    await eventually(has_answered, "the other rank has parked, too, and is not waited for")
    wrong = await cluster.client.command("n0", SaveReplica(step=f"{job}-s2", job=job, generation=1, rank=5, deadline_s=1))
    assert "take another one" in wrong.error
    assert (await cluster.client.command("n0", stop(job, 2))).result == {"stopped": 2}
    assert not any(psutil.pid_exists(pid) for pid in pids(reply))
    stale = await cluster.client.command("n0", SaveReplica(step=f"{job}-s3", job=job, generation=1, rank=0, deadline_s=1))
    assert stale.stale


async def test_an_obstinate_rank_is_killed_with_its_children(cluster: LocalCluster, job: str) -> None:
    reply = await cluster.launch("obstinate", ranks=1, job=job)
    await cluster.client.job_progress(job, generation=1, world_size=1, wait_s=10)
    grandchild = int((cluster.directory / "run/grandchild").read_text())
    assert psutil.pid_exists(grandchild)
    stopped = await cluster.client.command("n0", stop(job, 2, grace_s=0.2))
    assert stopped.result == {"stopped": 1}
    assert not psutil.pid_exists(pids(reply)[0])
    assert await gone(grandchild)
    assert await cluster.client.observations(job=job) == ()


async def gone(*processes: int) -> bool:
    async def ask() -> bool:
        alive = [pid for pid in processes if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        return not alive

    return await eventually(ask, f"the end of {processes}")


async def test_a_replaced_generation_is_refused(cluster: LocalCluster, job: str) -> None:
    assert (await cluster.client.command("n0", stop(job, 5))).ok
    for stale in (
        launch(job=job, generation=4),
        OpenRendezvous(step=f"{job}-o", job=job, generation=4),
        DrainRanks(step=f"{job}-d", job=job, below_generation=4, deadline_s=1),
        StopRanks(step=f"{job}-s", job=job, below_generation=4, grace_s=1),
    ):
        reply = await cluster.client.command("n0", stale)
        assert (reply.ok, reply.stale) == (False, True)
        assert "generation 5" in reply.error
    assert (await cluster.client.command("n0", launch(generation=4, job=f"{job}-b"))).ok
    assert (await cluster.client.command("n0", launch(job=job, generation=5))).ok


async def test_a_step_has_its_effect_once(cluster: LocalCluster, job: str) -> None:
    first = await cluster.launch(job=job)
    assert await cluster.client.command("n0", launch(job=job)) == first
    other_step = await cluster.client.command("n0", launch(job=job, step="of a second recovery process"))
    assert pids(other_step) == pids(first)
    os.kill(pids(first)[0], signal.SIGKILL)
    await cluster.observation("rank_exited", job)
    again = await cluster.client.command("n0", launch(job=job, step="of a third one"))
    assert pids(again) == pids(first), "a rank that has died is not started again in its generation"


async def test_the_store_of_a_generation_is_opened_once_and_ends_with_it(cluster: LocalCluster, job: str) -> None:
    first = await cluster.client.command("n0", OpenRendezvous(step=f"{job}-o1", job=job, generation=1))
    assert (await cluster.client.command("n0", OpenRendezvous(step=f"{job}-o2", job=job, generation=1))).result == first.result
    assert first.result["address"] == "127.0.0.1"
    holders = [p for p in descendants(cluster.processes[1]) if any(c.status == psutil.CONN_LISTEN for c in p.net_connections())]
    assert [c.laddr.port for c in holders[0].net_connections()] == [first.result["port"]]
    assert (await cluster.client.command("n0", stop(job, 2))).result == {"stopped": 1}
    assert not holders[0].is_running()


async def test_a_fork_server_that_dies_takes_its_ranks_along_and_is_replaced(cluster: LocalCluster, job: str) -> None:
    reply = await cluster.launch(job=job)
    await stepped(cluster, job)
    (server,) = psutil.Process(cluster.processes[1].pid).children()
    assert "forkserver" in " ".join(server.cmdline())
    server.kill()
    seen = await cluster.observation("rank_exited", job)
    assert isinstance(seen.body, RankExited)
    assert await gone(*pids(reply))

    async def both() -> bool:
        return len(await cluster.client.observations(job=job)) == 2

    await eventually(both, "both ranks are reported")
    await cluster.launch(generation=2, job=job)
    await stepped(cluster, job, generation=2)


async def test_what_cannot_be_imported_is_the_answer_to_a_launch(cluster: LocalCluster, job: str) -> None:
    cluster.start_agent("n1", "--preload", "no_such_module_anywhere")
    await cluster.node("n1")
    for step in ("l1", "l2"):
        reply = await cluster.client.command("n1", launch(job=job, step=step))
        assert not reply.ok
        assert "cannot import no_such_module_anywhere" in reply.error
