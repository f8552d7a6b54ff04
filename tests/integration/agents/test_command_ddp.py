"""The example script with a real process group: met by the agent's store, drained together, started again on another size."""

import asyncio
import time
from pathlib import Path

import pytest
from local_cluster import LocalCluster

from unicron_lib.agent.messages import DrainRanks, LaunchRanks, OpenRendezvous, StopRanks
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


async def start(cluster: LocalCluster, spec: JobSpec, *, generation: int, ranks: int) -> None:
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


async def stepped(cluster: LocalCluster, job: str, generation: int, ranks: int) -> None:
    """Importing torch may take long on a busy machine."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        found = await cluster.client.job_progress(job)
        if found and found.has_stepped(generation, ranks) and min(found.iterations.values()) >= 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{job} makes no steps")


def told(cluster: LocalCluster, job: str, generation: int) -> str:
    return (cluster.directory / "run" / "logs" / job / f"g{generation}-r0.log").read_text()


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
