"""A real agent on a stand-in for NVIDIA's library: what its GPUs suffer arrives at the controller, once."""

import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from local_cluster import LocalCluster, eventually

from unicron_lib.agent.messages import GpuFault, NodeNotice, Observation
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind, Severity

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from stand_in_driver import CURRENT, build, no_driver, write, xid

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the state of the GPUs of every agent that is started from now on."""
    state = tmp_path / "gpus"
    write(state, "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(tmp_path, *CURRENT)))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(state))
    return state


async def seen_of(cluster: LocalCluster, node: str) -> list[Observation]:
    return [o for o in await cluster.client.observations() if o.node == node]


async def observed(
    cluster: LocalCluster,
    node: str,
    number: int,
    wanted: Callable[[Observation], bool] = lambda o: isinstance(o.body, GpuFault),
) -> list[Observation]:
    """The wanted observations of the node, by default the faults of its GPUs, once there are `number` of them or more."""

    async def ask() -> list[Observation] | None:
        found = [o for o in await seen_of(cluster, node) if wanted(o)]
        return found if len(found) >= number else None

    return await eventually(ask, f"{number} observations of GPUs of {node}")


def notice(code: str) -> Callable[[Observation], bool]:
    return lambda o: isinstance(o.body, NodeNotice) and o.body.code == code


async def logged(cluster: LocalCluster, node: str, text: str) -> None:
    await eventually(_contains(cluster, node, text), f"{node} logs {text!r}")


def _contains(cluster: LocalCluster, node: str, text: str) -> Callable[[], Awaitable[bool]]:
    async def told() -> bool:
        return text in cluster.log(node)

    return told


async def test_each_fault_of_a_gpu_is_observed_once(cluster: LocalCluster, state: Path) -> None:
    """ECC errors rise and go on rising; then the other GPU is lost: one observation each."""
    write(state, "gpu0.ecc 3\n")
    cluster.start_agent("n1")
    await cluster.node("n1")
    await cluster.launch(node="n1", ranks=1)
    await logged(cluster, "n1", "watching the health of 2 GPUs")
    write(state, "gpu0.ecc 4\n")
    (risen,) = await observed(cluster, "n1", 1)
    write(state, "gpu0.ecc 5\ngpu1.lost 2\n")
    both = await observed(cluster, "n1", 2)
    assert both[0] == risen
    assert [(o.node, o.seq, o.body.kind, o.body.gpu, o.body.uuid) for o in both] == [
        ("n1", 0, "ecc_error", 0, "GPU-00000000"),
        ("n1", 1, "gpu_lost", 1, "GPU-00000001"),
    ]
    assert risen.body.jobs == ("a",)
    assert await cluster.client.observations(job="a") == tuple(both)
    assert await cluster.client.observations(job="b") == ()
    failure = classify(both[1])
    assert failure is not None
    assert (failure.kind, failure.severity, failure.node) == (ErrorKind.GPU_LOST, Severity.SEV1, "n1")
    assert "NVML error 15" in failure.evidence
    assert "Traceback" not in cluster.log("n1")


async def test_everything_that_breaks_at_once_is_told_by_one_look(cluster: LocalCluster, state: Path) -> None:
    """Broken links and memory, a GPU that is gone, another in the place of one, and what is only to be known.

    An Xid comes by itself.
    """
    write(state, "count 4\ngpu0.links 4\ngpu0.replays 1\ngpu0.action 0\n")
    cluster.start_agent("n2", "--num-gpus", "4")
    await cluster.node("n2")
    await logged(cluster, "n2", "watching the health of 4 GPUs")
    broken = "gpu0.links 4\ngpu0.link2.down 1\ngpu0.replays 99999\ngpu0.action 2\ngpu1.failure 1\ngpu1.ecc_aggregate 1\n"
    write(state, f"count 3\ngpu2.uuid 9\n{broken}gpu0.pending 1\n")
    faults = await observed(cluster, "n2", 4)
    assert {(o.body.kind, o.body.gpu, o.body.uuid) for o in faults} == {
        ("gpu_lost", 2, "GPU-00000002"),
        ("gpu_lost", 3, "GPU-00000003"),
        ("nvlink_error", 0, "GPU-00000000"),
        ("ecc_error", 1, "GPU-00000001"),
    }
    (asked,) = await observed(cluster, "n2", 1, notice("gpu_recovery_action"))
    assert asked.body.text == "GPU 0 needs a reboot of the node (recovery action 2)"
    assert classify(asked) is None
    assert len(await observed(cluster, "n2", 1, notice("row_remap_pending"))) == 1
    xid(state, 1, 79)
    (seen,) = await observed(cluster, "n2", 1, lambda o: isinstance(o.body, GpuFault) and o.body.xid == 79)
    assert (seen.body.gpu, seen.body.uuid) == (1, "GPU-00000001")


async def test_a_driver_that_hangs_takes_only_the_watching(cluster: LocalCluster, state: Path) -> None:
    """PB05: the node stays alive and takes commands, only a notice comes of it, and the agent can be stopped."""
    write(state, "gpu1.hang 1\n")
    agent = cluster.start_agent("n3")
    await cluster.node("n3")
    (hung,) = await observed(cluster, "n3", 1, notice("gpu_probe_hung"))
    assert "has not answered for 10 s" in hung.body.text
    await cluster.launch(node="n3", ranks=1, job="hung")
    assert (await cluster.node("n3")).verdict == "alive"
    assert await seen_of(cluster, "n3") == [hung]
    agent.send_signal(signal.SIGINT)
    assert agent.wait(20) == 0


async def test_a_driver_that_fails_for_a_while_is_a_notice_and_then_another(cluster: LocalCluster, state: Path) -> None:
    """PB04: the ranks go on, and what comes of it is told once."""
    cluster.start_agent("n4")
    await cluster.node("n4")
    await logged(cluster, "n4", "watching the health of 2 GPUs")
    write(state, "init 999\nerr 999\n")
    await observed(cluster, "n4", 1, notice("gpu_blind"))
    write(state, "")
    told = await observed(cluster, "n4", 2, notice("gpu_blind"))
    assert [o.body.active for o in told] == [True, False]
    assert await seen_of(cluster, "n4") == told


async def test_the_probe_goes_with_an_agent_that_is_killed(cluster: LocalCluster, state: Path) -> None:
    agent = cluster.start_agent("n5")
    await cluster.node("n5")
    await logged(cluster, "n5", "watching the health of 2 GPUs")
    (probe,) = (p for p in psutil.Process(agent.pid).children() if "unicron_lib.agent.probe_process" in p.cmdline())
    agent.kill()
    agent.wait(20)
    gone, _ = psutil.wait_procs([probe], timeout=20)
    assert gone == [probe]


async def test_without_a_driver_one_line_says_so(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(no_driver(tmp_path)))
    agent = cluster.start_agent("n6")
    await cluster.node("n6")
    await logged(cluster, "n6", "GPU health is not watched on this node")
    assert await seen_of(cluster, "n6") == []
    agent.terminate()
    assert agent.wait(20) == 0
    (line,) = (line for line in cluster.log("n6").splitlines() if "GPU" in line)
    assert "INFO unicron_lib.agent.probe: GPU health is not watched on this node: no NVIDIA driver is installed" in line
