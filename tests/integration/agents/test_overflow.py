"""A flood while nobody listens: it waits in the agent's file, hides nothing else, and arrives when the controller is back."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
from local_cluster import LocalCluster, eventually, pids

from unicron_lib.agent.messages import NodeNotice, Observation

NUM_LINES = 3000


def overflow_of(agent: subprocess.Popen[bytes]) -> Path | None:
    """In the private directory of the agent, where its socket is; None if nothing has overflown."""
    sockets = psutil.Process(agent.pid).net_connections("unix")
    directory = next(Path(str(s.laddr)).parent for s in sockets if str(s.laddr).endswith("/s"))
    return next(directory.glob("outbox-*"), None)


async def test_a_flood_outlasts_the_controller_and_hides_no_rank(cluster: LocalCluster) -> None:
    """The kernel tells of 3,000 links that went down, and then a rank is killed."""
    kernel = cluster.directory / "kernel"
    kernel.touch()
    agent = cluster.start_agent("n1", "--kernel-log", str(kernel))
    await cluster.node("n1")
    reply = await cluster.launch(node="n1", ranks=1)
    await cluster.client.job_progress("a", generation=1, world_size=1, wait_s=10)
    cluster.processes[0].kill()
    cluster.processes[0].wait()
    ports = [f"ib{number}" for number in range(NUM_LINES)]
    kernel.write_text("".join(f"mlx5_core 0000:5e:00.0 {port}: Link down\n" for port in ports))

    async def overflown() -> bool:
        overflow = overflow_of(agent)
        return overflow is not None and overflow.read_bytes().count(b"\n") == NUM_LINES - 1000

    await eventually(overflown, "what is too much for memory is in the file")
    os.kill(pids(reply)[0], signal.SIGKILL)
    await cluster.start_controller()
    exited = await cluster.observation("rank_exited", "a")
    assert exited.seq >= NUM_LINES, "although nobody has answered the flood"
    found: dict[str, Observation] = {}

    async def all_heard() -> bool:
        waiting = await cluster.client.observations(wait_s=1.0)
        found.update((observation.id, observation) for observation in waiting)
        await cluster.client.acknowledge([observation.id for observation in waiting])
        return len(said()) >= NUM_LINES

    def said() -> list[str]:
        return [o.body.text.split()[4] for o in found.values() if isinstance(o.body, NodeNotice)]

    await eventually(all_heard, "the flood has arrived")
    assert said() == ports

    async def emptied() -> bool:
        return overflow_of(agent) is None

    await eventually(emptied, "the file is gone")
