"""A real agent follows a log of the kernel: what its lines tell arrives at the controller, once."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from local_cluster import LocalCluster, eventually, pids

from unicron_lib.agent.messages import GpuFault, NodeNotice, Observation, RankExited
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind, Severity

pytestmark = pytest.mark.asyncio(loop_scope="module")
PORT = "mlx5_core 0000:5e:00.0 ib0: Link {}\n"


def xid(gpu: int, code: int, text: str = "text") -> str:
    """What the driver writes; on a node without GPUs, GPU i is taken to be at bus i + 1."""
    return f"NVRM: Xid (PCI:0000:{gpu + 1:02x}:00): {code}, pid={os.getpid()}, name=python, {text}\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


async def told(cluster: LocalCluster, node: str, number: int) -> list[Observation]:
    """What waits of the node's hardware, once there are `number` of them or more."""

    async def ask() -> list[Observation] | None:
        waiting = await cluster.client.observations(wait_s=1.0)
        found = [one for one in waiting if one.node == node and isinstance(one.body, GpuFault | NodeNotice)]
        return found if len(found) >= number else None

    return await eventually(ask, f"{number} observations of the hardware of {node}")


def faults(observations: Sequence[Observation]) -> list[GpuFault]:
    return [one.body for one in observations if isinstance(one.body, GpuFault)]


def notices(observations: Sequence[Observation]) -> list[NodeNotice]:
    return [one.body for one in observations if isinstance(one.body, NodeNotice)]


async def logged(cluster: LocalCluster, node: str, text: str) -> None:
    async def is_there() -> bool:
        return text in cluster.log(node)

    await eventually(is_there, f"{node} logs {text!r}")


async def start(cluster: LocalCluster, node: str, log: Path) -> None:
    cluster.start_agent(node, "--kernel-log", str(log))
    await cluster.node(node)
    await logged(cluster, node, f"following the kernel's log {log}")


async def test_each_xid_is_observed_once(shared_cluster: LocalCluster) -> None:
    """PB06, PB09, PB10: a lost GPU and its echoes, a code nobody knows, and what was there before the agent."""
    log = shared_cluster.directory / "kern-1.log"
    append(log, xid(0, 48, "of yesterday"))
    await start(shared_cluster, "n1", log)
    await shared_cluster.launch(node="n1", ranks=1)
    append(log, "noise\n" + xid(1, 79, "GPU has fallen off the bus.") * 3 + xid(0, 45) * 200)
    append(log, xid(0, 9999) + "\xff\x00 binary \n" + "x" * 100_000 + "\n")
    found = await told(shared_cluster, "n1", 3)
    lost, echo = faults(found)
    assert (lost.kind, lost.gpu, lost.xid, lost.jobs, lost.symptom) == ("gpu_lost", 1, 79, ("a",), False)
    assert (echo.xid, echo.symptom, echo.gpu, echo.count) == (45, True, 0, 200)
    failure = classify(found[0])
    assert failure is not None
    assert (failure.kind, failure.severity, failure.node) == (ErrorKind.GPU_LOST, Severity.SEV1, "n1")
    (notice,) = notices(found)
    assert (notice.code, notice.active) == ("xid", True)
    assert "Xid 9999" in notice.text
    append(log, xid(1, 79, "GPU has fallen off the bus.") + xid(0, 94))
    assert [fault.xid for fault in faults(await told(shared_cluster, "n1", 4))] == [79, 45, 94]
    assert "Traceback" not in shared_cluster.log("n1")


async def test_links_and_gpus_are_told_through_a_rotation(shared_cluster: LocalCluster) -> None:
    log = shared_cluster.directory / "kern-2.log"
    log.touch()
    await start(shared_cluster, "n2", log)
    append(log, (PORT.format("down") + PORT.format("up")) * 3)
    log.rename(shared_cluster.directory / "kern-2.log.1")
    append(log, xid(0, 74, "NVLink: fatal error detected on link 2(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"))
    found = await told(shared_cluster, "n2", 7)
    assert [(fault.kind, fault.gpu) for fault in faults(found)] == [("link_flapping", None), ("nvlink_error", 0)]
    assert {notice.code for notice in notices(found)} == {"link_down"}


async def test_a_fifo_serves_as_well(shared_cluster: LocalCluster) -> None:
    log = shared_cluster.directory / "fifo"
    os.mkfifo(log)
    await start(shared_cluster, "n3", log)
    codes = [48, 64, 79, 119]
    for number, code in enumerate(codes, start=1):
        append(log, xid(0, code))
        assert [fault.xid for fault in faults(await told(shared_cluster, "n3", number))] == codes[:number]


async def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed(
    shared_cluster: LocalCluster,
) -> None:
    log = shared_cluster.directory / "kern-6.log"
    log.touch()
    await start(shared_cluster, "n6", log)
    victim, other = pids(await shared_cluster.launch(node="n6", job="b", ranks=2))
    append(log, f"Out of memory: Killed process {victim} (python) total-vm:1kB, anon-rss:1kB\n")
    await logged(shared_cluster, "n6", f"the kernel has killed process {victim}")
    for pid in (victim, other):
        os.kill(pid, signal.SIGKILL)

    async def both() -> dict[int, bool] | None:
        waiting = await shared_cluster.client.observations(job="b", wait_s=1.0)
        ends = {one.body.pid: one.body.out_of_memory for one in waiting if isinstance(one.body, RankExited)}
        return ends if len(ends) == 2 else None

    assert await eventually(both, "both ranks have ended") == {victim: True, other: False}


async def test_a_log_that_cannot_be_read_or_is_not_wanted_costs_one_line(shared_cluster: LocalCluster) -> None:
    missing = shared_cluster.directory / "nothing"
    for node, option, reason in (("n4", str(missing), f"{missing} cannot be read"), ("n5", "none", "it was asked for none")):
        agent = shared_cluster.start_agent(node, "--kernel-log", option)
        await shared_cluster.node(node)
        await logged(shared_cluster, node, f"the kernel's log is not watched on this node: {reason}")
        agent.terminate()
        assert agent.wait(20) == 0
        assert shared_cluster.log(node).count("is not watched on this node: " + reason) == 1
