"""Ranks under a real agent and a real controller."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
from local_cluster import LocalCluster, descendants, eventually, launch, pids

from unicron_lib.agent.messages import (
    DrainRanks,
    InjectFault,
    OpenRendezvous,
    RankExited,
    RankFailed,
    SaveReplica,
    StopRanks,
)


async def stepped(cluster: LocalCluster, generation: int = 1) -> None:
    seen = await cluster.client.job_progress("a", generation=generation, world_size=2, wait_s=10)
    assert seen is not None
    assert seen.has_stepped(generation, 2)


def stop(below: int, grace_s: float = 5.0) -> StopRanks:
    return StopRanks(step=f"stop-{below}", job="a", below_generation=below, grace_s=grace_s)


async def test_ranks_start_and_step(cluster: LocalCluster) -> None:
    await cluster.launch()
    await stepped(cluster)
    seen = await cluster.client.job_progress("a")
    assert seen is not None
    assert set(seen.iterations) == {0, 1}
    assert seen.measured_flops == {2: 2e9}
    assert await cluster.client.job_progress("unknown") is None
    assert [job.job for job in await cluster.client.progress()] == ["a"]
    log = (cluster.directory / "run/logs/a/g1-r0.log").read_text()
    assert "hello from" in log


async def test_a_killed_rank_is_reported(cluster: LocalCluster) -> None:
    reply = await cluster.launch()
    await stepped(cluster)
    began = time.monotonic()
    assert (await cluster.client.command("n0", InjectFault(step="x", fault="crash", job="a", rank=1))).ok
    seen = await cluster.observation("rank_exited")
    print(f"seen {1000 * (time.monotonic() - began):.1f} ms after the injection was asked for")
    assert isinstance(seen.body, RankExited)
    assert (seen.body.rank, seen.body.exit_code, seen.body.pid) == (1, -9, pids(reply)[1])
    assert seen.body.iteration >= 0


async def test_an_exit_code_is_passed_on_unchanged(cluster: LocalCluster) -> None:
    await cluster.launch("exit16", ranks=1)
    seen = await cluster.observation("rank_exited")
    assert isinstance(seen.body, RankExited)
    assert seen.body.exit_code == 16


async def test_a_rank_that_fails_at_once_is_one_observation(cluster: LocalCluster) -> None:
    await cluster.launch("fail", ranks=1)
    seen = await cluster.observation("rank_failed")
    assert isinstance(seen.body, RankFailed)
    assert not seen.body.parked
    assert len(seen.body.message) < 40_000
    await cluster.node(ranks=())
    assert [observation.id for observation in await cluster.client.observations()] == [seen.id]


async def test_a_rank_that_finishes_is_one_observation(cluster: LocalCluster) -> None:
    await cluster.launch("finish", ranks=1)
    seen = await cluster.observation("rank_finished")
    await cluster.node(ranks=())
    assert [observation.id for observation in await cluster.client.observations(job="a")] == [seen.id]
    assert await cluster.client.observations(job="b") == ()
    assert await cluster.client.observations(min_age_s=60) == ()
    assert await cluster.client.acknowledge([seen.id, "unknown"]) == 1
    assert await cluster.client.observations() == ()


async def test_an_exception_and_a_nan_are_injected(cluster: LocalCluster) -> None:
    await cluster.launch()
    await stepped(cluster)
    assert (await cluster.client.command("n0", InjectFault(step="x1", fault="exception", job="a", rank=0))).ok
    assert (await cluster.observation("rank_failed")).body.rank == 0
    assert (await cluster.client.command("n0", InjectFault(step="x2", fault="nan", job="a", rank=1))).ok

    async def nan() -> bool:
        seen = await cluster.client.job_progress("a")
        return seen is not None and seen.loss != seen.loss  # noqa: PLR0124

    await eventually(nan, "a NaN arrives as NaN")
    refused = await cluster.client.command("n0", InjectFault(step="x3", fault="crash", job="a", rank=7))
    assert not refused.ok
    assert "does not run" in refused.error


async def test_drain_tells_what_became_of_each_rank(cluster: LocalCluster) -> None:
    await cluster.launch("step", generation=1)
    await stepped(cluster)
    drain = DrainRanks(step="d1", job="a", below_generation=2, deadline_s=10)
    reply = await cluster.client.command("n0", drain)
    ranks = reply.result["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["rank"], rank["generation"], rank["state"]) for rank in ranks] == [(0, 1, "drained"), (1, 1, "drained")]
    assert all(rank["manifest"] == f"manifest-{rank['iteration']}" for rank in ranks)
    await cluster.node(ranks=())
    again = await cluster.client.command("n0", DrainRanks(step="d2", job="a", below_generation=2, deadline_s=10))
    assert again.result == reply.result
    assert await cluster.client.observations() == ()


async def test_drain_does_not_wait_for_the_parked_the_dead_and_the_hung(cluster: LocalCluster) -> None:
    await cluster.launch("park", ranks=1, generation=1)
    await cluster.launch("exit16", ranks=1, generation=2)
    await cluster.launch("step", ranks=1, generation=3)
    await cluster.client.job_progress("a", generation=3, world_size=1, wait_s=10)
    await cluster.observation("rank_exited")
    await cluster.observation("rank_failed")
    hung = await cluster.client.command("n0", InjectFault(step="x", fault="hang", job="a", rank=0))
    assert psutil.Process(int(str(hung.result["pid"]))).status() == psutil.STATUS_STOPPED
    reply = await cluster.client.command("n0", DrainRanks(step="d", job="a", below_generation=4, deadline_s=0.3))
    ranks = reply.result["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["generation"], rank["state"]) for rank in ranks] == [(1, "parked"), (2, "gone"), (3, "busy")]
    stopped = await cluster.client.command("n0", stop(4))
    assert stopped.result == {"stopped": 2}


async def test_a_parked_rank_saves_its_replica_and_quits(cluster: LocalCluster) -> None:
    reply = await cluster.launch("park", ranks=2)
    await cluster.observation("rank_failed")
    save = SaveReplica(step="s", job="a", generation=1, rank=0, deadline_s=10)
    saved = await cluster.client.command("n0", save)
    assert saved.result == {"iteration": 0, "manifest": "manifest-replica"}
    wrong = await cluster.client.command("n0", SaveReplica(step="s2", job="a", generation=1, rank=5, deadline_s=1))
    assert "take another one" in wrong.error
    assert (await cluster.client.command("n0", stop(2))).result == {"stopped": 2}
    assert not any(psutil.pid_exists(pid) for pid in pids(reply))
    stale = await cluster.client.command("n0", SaveReplica(step="s3", job="a", generation=1, rank=0, deadline_s=1))
    assert stale.stale


async def test_an_obstinate_rank_is_killed_with_its_children(cluster: LocalCluster) -> None:
    reply = await cluster.launch("obstinate", ranks=1)
    await cluster.client.job_progress("a", generation=1, world_size=1, wait_s=10)
    grandchild = int((cluster.directory / "run/grandchild").read_text())
    assert psutil.pid_exists(grandchild)
    stopped = await cluster.client.command("n0", stop(2, grace_s=0.2))
    assert stopped.result == {"stopped": 1}
    assert not psutil.pid_exists(pids(reply)[0])
    assert await gone(grandchild)
    assert await cluster.client.observations() == ()


async def gone(*processes: int) -> bool:
    async def ask() -> bool:
        alive = [pid for pid in processes if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        return not alive

    return await eventually(ask, f"the end of {processes}")


async def test_a_replaced_generation_is_refused(cluster: LocalCluster) -> None:
    assert (await cluster.client.command("n0", stop(5))).ok
    for stale in (
        launch(generation=4),
        OpenRendezvous(step="o", job="a", generation=4),
        DrainRanks(step="d", job="a", below_generation=4, deadline_s=1),
        StopRanks(step="s", job="a", below_generation=4, grace_s=1),
    ):
        reply = await cluster.client.command("n0", stale)
        assert (reply.ok, reply.stale) == (False, True)
        assert "generation 5" in reply.error
    assert (await cluster.client.command("n0", launch(generation=4, job="b"))).ok
    assert (await cluster.client.command("n0", launch(generation=5))).ok


async def test_a_step_has_its_effect_once(cluster: LocalCluster) -> None:
    first = await cluster.launch()
    assert await cluster.client.command("n0", launch()) == first
    other_step = await cluster.client.command("n0", launch(step="of a second recovery process"))
    assert pids(other_step) == pids(first)
    assert len((await cluster.node()).ranks) <= 2
    os.kill(pids(first)[0], signal.SIGKILL)
    await cluster.observation("rank_exited")
    again = await cluster.client.command("n0", launch(step="of a third one"))
    assert pids(again) == pids(first), "a rank that has died is not started again in its generation"


async def test_the_store_of_a_generation_is_opened_once_and_ends_with_it(cluster: LocalCluster) -> None:
    first = await cluster.client.command("n0", OpenRendezvous(step="o1", job="a", generation=1))
    assert (await cluster.client.command("n0", OpenRendezvous(step="o2", job="a", generation=1))).result == first.result
    assert first.result["address"] == "127.0.0.1"
    holders = [p for p in descendants(cluster.processes[1]) if any(c.status == psutil.CONN_LISTEN for c in p.net_connections())]
    assert [c.laddr.port for c in holders[0].net_connections()] == [first.result["port"]]
    assert (await cluster.client.command("n0", stop(2))).result == {"stopped": 1}
    assert not holders[0].is_running()


async def test_a_fork_server_that_dies_takes_its_ranks_along_and_is_replaced(cluster: LocalCluster) -> None:
    reply = await cluster.launch()
    await stepped(cluster)
    (server,) = psutil.Process(cluster.processes[1].pid).children()
    assert "forkserver" in " ".join(server.cmdline())
    server.kill()
    seen = await cluster.observation("rank_exited")
    assert isinstance(seen.body, RankExited)
    assert await gone(*pids(reply))

    async def both() -> bool:
        return len(await cluster.client.observations()) == 2

    await eventually(both, "both ranks are reported")
    await cluster.launch(generation=2)
    await stepped(cluster, generation=2)


async def test_what_cannot_be_imported_is_the_answer_to_a_launch(cluster: LocalCluster) -> None:
    cluster.start_agent("n1", "--preload", "no_such_module_anywhere")
    await cluster.node("n1")
    for step in ("l1", "l2"):
        reply = await cluster.client.command("n1", launch(step=step))
        assert not reply.ok
        assert "cannot import no_such_module_anywhere" in reply.error


async def test_the_environment_is_torchruns(cluster: LocalCluster) -> None:
    reply = await cluster.launch(ranks=2, generation=3, node_rank=1, num_nodes=4, world_size=8, restore_from="m")
    env = psutil.Process(pids(reply)[1]).environ()  # of the fork server: a forked process keeps what it was started with
    assert "RANK" not in env
    await eventually(lambda: _written(cluster.directory / "run/logs/a/g3-r1.log"), "the rank says hello")
    described = json.loads((cluster.directory / "run/logs/a/g3-r1.log").read_text().splitlines()[0].split(" ", 2)[2].replace("'", '"'))
    assert described == {"job": "a", "generation": 3, "rank": 1}


async def _written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
