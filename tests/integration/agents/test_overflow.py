"""A flood while nobody listens: it waits in the agent's file, and arrives when the controller is back."""

from pathlib import Path

import psutil
from local_cluster import LocalCluster, eventually

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import RankFailed

RANK_LINES = 3000


def overflow_of(cluster: LocalCluster) -> Path:
    """In the private directory of the agent, where its socket is."""
    sockets = psutil.Process(cluster.processes[1].pid).net_connections("unix")
    return next(Path(str(s.laddr)).parent for s in sockets if str(s.laddr).endswith("/s")) / "outbox"


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_a_flood_outlasts_the_controller(cluster: LocalCluster) -> None:
    await cluster.launch("flood_on_sign", ranks=1)
    await cluster.client.job_progress("a", generation=1, world_size=1, wait_s=10)
    cluster.processes[0].kill()
    cluster.processes[0].wait()
    sign, overflow = cluster.directory / "run/flood", overflow_of(cluster)
    sign.touch()

    async def overflown() -> bool:
        return num_lines(overflow) > RANK_LINES - 1000

    await eventually(overflown, "what is too much for memory is in the file")
    await cluster.start_controller()
    found: dict[str, Observation] = {}

    async def all_heard() -> bool:
        waiting = await cluster.client.observations(job="a", wait_s=1.0)
        found.update((observation.id, observation) for observation in waiting)
        await cluster.client.acknowledge([observation.id for observation in waiting])
        return any(isinstance(o.body, RankFailed) and o.body.error_type == "Last" for o in found.values())

    await eventually(all_heard, "the flood has arrived")
    said = [o.body.message for o in found.values() if isinstance(o.body, RankFailed)]
    assert said == [*(f"distinct {number}" for number in range(RANK_LINES)), "m"]

    async def emptied() -> bool:
        return not overflow.exists()

    await eventually(emptied, "the file is gone")
