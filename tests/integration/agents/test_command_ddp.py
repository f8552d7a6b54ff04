"""The example scripts with a real process group: met by the agent's store, drained or parked together, started again."""

import asyncio
import time
from pathlib import Path

import pytest
from local_cluster import LocalCluster, pids

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import DrainRanks, HoldRanks, LaunchRanks, OpenRendezvous, StopRanks
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = Path(__file__).parents[3] / "examples"


async def with_real_stores(cluster: LocalCluster) -> None:
    """A second node, n1, whose stores are torch's; it joins when torch is imported, which may take long on a busy machine."""
    if any(view.node == "n1" for view in await cluster.client.nodes()):
        return
    module = "unicron_lib.training.rendezvous"
    cluster.start_agent("n1", "--rendezvous-target", f"{module}:main", "--preload", module)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        if any(view.node == "n1" and view.connected for view in await cluster.client.nodes()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(cluster.log("n1"))


async def start(cluster: LocalCluster, spec: JobSpec, *, generation: int, ranks: int) -> list[int]:
    job = spec.job
    opened = await cluster.client.command("n1", OpenRendezvous(step=f"o-{job}-{generation}", job=job, generation=generation))
    assert opened.ok, opened.error
    command = LaunchRanks(
        step=f"l-{job}-{generation}",
        job=job,
        generation=generation,
        spec=spec,
        layout=Layout(dp=ranks),
        ranks=tuple((rank, rank) for rank in range(ranks)),
        world_size=ranks,
        node_rank=0,
        num_nodes=1,
        master_addr=str(opened.result["address"]),
        master_port=int(str(opened.result["port"])),
        store_url="file:///nowhere",
    )
    reply = await cluster.client.command("n1", command)
    assert reply.ok, reply.error
    return pids(reply)


async def stepped(cluster: LocalCluster, job: str, generation: int, ranks: int) -> None:
    """Importing torch may take long on a busy machine."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        found = await cluster.client.job_progress(job)
        if found and found.has_stepped(generation, ranks) and min(found.iterations.values()) >= 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{job} makes no steps")


def told(cluster: LocalCluster, job: str, generation: int, rank: int = 0) -> str:
    return (cluster.directory / "run" / "logs" / job / f"g{generation}-r{rank}.log").read_text()


@pytest.mark.parametrize(
    ("example", "keys", "steps"),
    [
        ("ddp", ("--save-every", "1000", "--checkpoint", "c.pt"), "--steps"),
        ("hf_style", ("--save-steps", "1000"), "--max-steps"),
    ],
)
async def test_an_example_is_drained_and_goes_on_where_it_was(
    shared_cluster: LocalCluster, example: str, keys: tuple[str, ...], steps: str
) -> None:
    cluster, job = shared_cluster, example.replace("_", "-")
    await with_real_stores(cluster)
    script = str(EXAMPLES / example / "train.py")
    spec = JobSpec(job=job, command=("python", script, *keys, steps, "1000000"))
    await start(cluster, spec, generation=1, ranks=2)
    await stepped(cluster, job, 1, 2)
    drain = DrainRanks(step=f"drain-{job}", job=job, below_generation=2, deadline_s=60.0)
    drained = await cluster.client.command("n1", drain, timeout_s=90.0)
    ranks = drained.result["ranks"]
    assert [rank["state"] for rank in ranks] == ["drained", "drained"]
    (last,) = {rank["iteration"] for rank in ranks}  # both have stopped after the same step
    await cluster.client.command("n1", StopRanks(step=f"stop-{job}", job=job, below_generation=2, grace_s=2.0))
    whole = ("python", script, *keys, steps, str(last + 5))
    await start(cluster, JobSpec(job=job, command=whole), generation=2, ranks=1)
    for _ in range(3):  # importing torch may take long on a busy machine
        waiting = await cluster.client.observations(job=job, wait_s=50.0)
        if waiting:
            break
    assert [it.body.type for it in waiting] == ["rank_finished"]
    assert f"resumed from step {last if example == 'ddp' else last + 1}" in told(cluster, job, 2)


async def hold(
    cluster: LocalCluster, job: str, below: int, *, abort: bool, deadline_s: float = 60.0
) -> list[dict[str, object]]:
    """Have the job's ranks park, and end the others."""
    order = HoldRanks(step=f"h-{job}-{below}", job=job, below_generation=below, deadline_s=deadline_s, abort=abort)
    held = await cluster.client.command("n1", order, timeout_s=90.0)
    assert held.ok, held.error
    stop = StopRanks(step=f"s-{job}-{below}", job=job, below_generation=below, grace_s=2.0, keep_gpus=(0, 1))
    stopped = await cluster.client.command("n1", stop)
    assert stopped.ok, stopped.error
    ranks = held.result["ranks"]
    assert isinstance(ranks, list)
    return ranks


async def test_who_parks_keeps_its_process_and_gives_its_state_to_a_new_rank(shared_cluster: LocalCluster) -> None:
    cluster, job = shared_cluster, "ddp-parks"
    await with_real_stores(cluster)
    keys = ("--save-every", "1000000", "--checkpoint", "c.pt", "--steps", "1000000")
    spec = JobSpec(job=job, command=("python", str(EXAMPLES / "ddp" / "train.py"), *keys), parks=True)
    first = await start(cluster, spec, generation=1, ranks=2)
    await stepped(cluster, job, 1, 2)
    assert (await cluster.client.command("n1", InjectFault(step=f"x-{job}", fault="crash", job=job, rank=1))).ok
    lost = {rank["rank"]: rank for rank in await hold(cluster, job, 2, abort=True)}
    assert (lost[0]["state"], lost[1]["state"]) == ("parked", "gone")
    second = await start(cluster, spec, generation=2, ranks=2)
    again = {rank["rank"]: rank for rank in await hold(cluster, job, 3, abort=True)}  # the new one still imports torch
    assert (again[0]["state"], again[1]["state"]) == ("parked", "busy")
    third = await start(cluster, spec, generation=3, ranks=2)
    assert third[0] == second[0] == first[0]
    assert len({first[1], second[1], third[1]}) == 3
    await stepped(cluster, job, 3, 2)
    assert f"took the state after step {lost[0]['iteration']} from rank 0" in told(cluster, job, 3, rank=1)
    moved = await hold(cluster, job, 4, abort=False)
    assert [rank["state"] for rank in moved] == ["parked", "parked"]
    assert len({rank["iteration"] for rank in moved}) == 1, "both have parked after the same step"
    assert await start(cluster, spec, generation=4, ranks=2) == third
    await stepped(cluster, job, 4, 2)
    assert "took the state" not in told(cluster, job, 3) + told(cluster, job, 4)
    assert (await cluster.client.command("n1", InjectFault(step=f"y-{job}", fault="hang", job=job, rank=1))).ok
    hung = {rank["rank"]: rank["state"] for rank in await hold(cluster, job, 5, abort=True, deadline_s=10.0)}
    assert hung == {0: "parked", 1: "gone"}, "what it waits for is broken from outside"
    news = await cluster.client.observations(job=job, wait_s=0.0)
    assert {it.body.generation for it in news} <= {1, 4}, "of what nobody had asked for"
    await cluster.client.command("n1", StopRanks(step=f"s-{job}", job=job, below_generation=5, grace_s=2.0))
