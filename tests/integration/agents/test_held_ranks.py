"""Ranks that live on from one generation to the next, under a real agent and a real controller."""

import json
import os

import psutil
import pytest
from local_cluster import LocalCluster, eventually, launch, pids

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import HoldRanks, Reply, SaveReplica, StopRanks

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job of the test's own: the cluster is shared."""
    return f"job-{abs(hash(request.node.name)) % 10**8}"


async def stepped(cluster: LocalCluster, job: str, generation: int, ranks: int = 2):
    seen = await cluster.client.job_progress(job, generation=generation, world_size=ranks, wait_s=10)
    assert seen is not None
    assert seen.has_stepped(generation, ranks)
    return seen


def hold(job: str, below: int, *, abort: bool = True, condemned: tuple[int, ...] = (), deadline_s: float = 10.0) -> HoldRanks:
    step = f"hold-{job}-{below}"
    return HoldRanks(step=step, job=job, below_generation=below, deadline_s=deadline_s, abort=abort, condemned=condemned)


def stop(job: str, below: int, *keep_gpus: int) -> StopRanks:
    return StopRanks(step=f"stop-{job}-{below}", job=job, below_generation=below, grace_s=5.0, keep_gpus=keep_gpus)


def ranks_of(reply: Reply) -> list[dict[str, object]]:
    assert reply.ok, reply.error
    ranks = reply.result["ranks"]
    assert isinstance(ranks, list)
    return [{key: value for key, value in rank.items() if key not in {"iteration", "manifest"}} for rank in ranks]


def told(rank: int, state: str, *, generation: int = 1, gpu: int | None = None, micro_batches: int = 2) -> dict[str, object]:
    gpu = rank if gpu is None else gpu
    return {"rank": rank, "generation": generation, "state": state, "gpu": gpu, "micro_batches": micro_batches}


@pytest.mark.parametrize("how", ["at-once", "together"])
async def test_held_ranks_go_on_in_the_next_generation_as_the_processes_that_they_are(
    cluster: LocalCluster, job: str, how: str
) -> None:
    before = pids(await cluster.launch("live_on", job=job))
    seen = await stepped(cluster, job, 1)
    held = await cluster.client.command("n0", hold(job, 2, abort=how == "at-once"))
    assert ranks_of(held) == [told(0, "parked"), told(1, "parked")]
    assert (await cluster.client.command("n0", stop(job, 2, 0, 1))).result == {"stopped": 0}
    after = await cluster.launch("live_on", job=job, generation=2)
    assert pids(after) == before
    now = await stepped(cluster, job, 2)
    assert now.iteration > seen.iteration
    assert {origin.source for origin in now.origins.values()} == {"own memory"}
    assert {(rank.generation, rank.rank, rank.pid) for rank in (await cluster.node()).ranks if rank.job == job} == {
        (2, 0, before[0]),
        (2, 1, before[1]),
    }
    again = await cluster.client.command("n0", launch("live_on", job=job, generation=2, step=f"{job}-again"))
    assert pids(again) == before, "they are left alone"
    assert await cluster.client.observations(job=job) == ()


async def test_a_rank_that_lives_on_is_told_all_but_its_device(cluster: LocalCluster, job: str) -> None:
    await cluster.launch("live_on", job=job)
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    await cluster.client.command("n0", stop(job, 2, 1))
    await cluster.launch("live_on", ranks=1, ranks_at=((0, 1),), job=job, generation=2)
    await stepped(cluster, job, 2, ranks=1)
    log = cluster.directory / "run/logs" / job / "g2-r0.log"
    environment = json.loads(log.read_text())
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("0", "1", "0")
    assert environment["UNICRON_BEAT_FILE"].endswith(f"{job}-g2-r0")
    assert "CUDA_VISIBLE_DEVICES" not in environment


async def test_whoever_has_died_or_hangs_is_replaced_by_a_new_process(cluster: LocalCluster, job: str) -> None:
    """A hang is turned into a crash that nobody needs to hear of."""
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    assert (await cluster.client.command("n0", InjectFault(step=f"{job}-x", fault="hang", job=job, rank=1))).ok
    held = await cluster.client.command("n0", hold(job, 2, condemned=(1,), deadline_s=60))
    assert ranks_of(held) == [told(0, "parked"), told(1, "gone", micro_batches=0)]
    assert not psutil.pid_exists(before[1])
    assert (await cluster.client.command("n0", stop(job, 2, 0, 1))).result == {"stopped": 0}
    after = pids(await cluster.launch("live_on", job=job, generation=2))
    assert after[0] == before[0]
    assert after[1] not in before
    await stepped(cluster, job, 2)
    assert await cluster.client.observations(job=job) == ()


async def test_who_does_not_park_in_time_is_killed(cluster: LocalCluster, job: str) -> None:
    (deaf,) = pids(await cluster.launch("deaf", ranks=1, job=job))
    await cluster.client.job_progress(job, generation=1, world_size=1, wait_s=10)
    held = await cluster.client.command("n0", hold(job, 2, abort=False, deadline_s=0.2))
    assert ranks_of(held) == [told(0, "gone", micro_batches=0)]
    assert not psutil.pid_exists(deaf)
    assert await cluster.client.observations(job=job) == ()


async def test_held_ranks_on_gpus_that_the_job_gives_up_are_ended(cluster: LocalCluster, job: str) -> None:
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    assert (await cluster.client.command("n0", stop(job, 2, 0))).result == {"stopped": 1}
    assert not psutil.pid_exists(before[1])
    after = pids(await cluster.launch("live_on", ranks=1, job=job, generation=2))
    assert after == before[:1]
    assert (await stepped(cluster, job, 2, ranks=1)).world_size == 1


async def test_held_ranks_outlive_a_plan_that_is_given_up(cluster: LocalCluster, job: str) -> None:
    """The next one holds them again; what the first one sends late does them no harm."""
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    await cluster.client.command("n0", hold(job, 3))
    assert (await cluster.client.command("n0", stop(job, 2))).result == {"stopped": 0}
    late = await cluster.client.command("n0", launch("live_on", job=job, generation=2))
    assert (late.ok, late.stale) == (False, True)
    assert "generation 3 is the oldest one that this node obeys" in late.error
    assert (await cluster.client.command("n0", stop(job, 3, 0, 1))).result == {"stopped": 0}
    assert pids(await cluster.launch("live_on", job=job, generation=3)) == before
    await stepped(cluster, job, 3)


async def test_held_ranks_that_no_plan_wants_any_more_save_their_replica_and_end(cluster: LocalCluster, job: str) -> None:
    """Their own generation is fenced off by then: they write as that of the plan that was given up."""
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    await cluster.client.command("n0", stop(job, 2, 0, 1))
    it = {"job": job, "generation": 1, "rank": 0, "deadline_s": 10.0}
    stale = await cluster.client.command("n0", SaveReplica(step=f"{job}-s1", **it))
    assert stale.stale
    saved = await cluster.client.command("n0", SaveReplica(step=f"{job}-s2", **it, as_generation=2))
    assert saved.result["manifest"] == "as 2"
    assert (await cluster.client.command("n0", stop(job, 3))).result == {"stopped": 2}
    assert not any(psutil.pid_exists(pid) for pid in before)


async def test_a_launch_ends_held_ranks_that_it_does_not_take_over(cluster: LocalCluster, job: str) -> None:
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    await cluster.client.command("n0", stop(job, 2, 0, 1))
    assert pids(await cluster.launch("live_on", ranks=1, job=job, generation=2)) == before[:1]
    assert not psutil.pid_exists(before[1])


async def test_a_held_rank_that_dies_is_no_news_but_is_not_launched_either(cluster: LocalCluster, job: str) -> None:
    before = pids(await cluster.launch("live_on", job=job))
    await stepped(cluster, job, 1)
    await cluster.client.command("n0", hold(job, 2))
    await cluster.client.command("n0", stop(job, 2, 0, 1))
    os.kill(before[1], 9)

    async def is_gone() -> bool:
        return all(rank.pid != before[1] for rank in (await cluster.node()).ranks)

    await eventually(is_gone, "the agent has noticed it")
    after = pids(await cluster.launch("live_on", job=job, generation=2))
    assert after[0] == before[0]
    assert after[1] not in before
    await stepped(cluster, job, 2)
