"""A real agent on a stand-in for NVIDIA's library: what its GPUs suffer arrives at the controller, once."""

import os
import sys
from pathlib import Path

import pytest
from local_cluster import LocalCluster, eventually

from unicron_lib.agent.messages import GpuFault, Observation
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind, Severity

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from stand_in_driver import REMAPPED_ROWS, build, no_driver


def write(state: Path, text: str) -> None:
    """At once: the stand-in reads the file whenever it is asked."""
    new = state.with_suffix(".new")
    new.write_text(text)
    os.replace(new, state)  # noqa: PTH105


async def faults(cluster: LocalCluster, number: int) -> list[Observation]:
    """The observations of GPUs once there are `number` of them, or more."""

    async def ask() -> list[Observation] | None:
        found = [o for o in await cluster.client.observations() if isinstance(o.body, GpuFault)]
        return found if len(found) >= number else None

    return await eventually(ask, f"{number} observations of GPUs")


async def logged(cluster: LocalCluster, node: str, text: str) -> None:
    async def told() -> bool:
        return text in cluster.log(node)

    await eventually(told, f"{node} logs {text!r}")


async def test_each_fault_of_a_gpu_is_observed_once(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """ECC errors rise and go on rising; then the other GPU is lost: one observation each."""
    state = cluster.directory / "gpus"
    write(state, "gpu0.ecc 3\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(cluster.directory, REMAPPED_ROWS)))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(state))
    cluster.start_agent("n1")
    await cluster.node("n1")
    await cluster.launch(node="n1", ranks=1)
    await logged(cluster, "n1", "watching the health of 2 GPUs")
    write(state, "gpu0.ecc 4\n")
    (risen,) = await faults(cluster, 1)
    write(state, "gpu0.ecc 5\ngpu1.lost 2\n")
    both = await faults(cluster, 2)
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


async def test_a_driver_that_hangs_takes_only_the_watching(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """PB05: the node stays alive and takes commands, nothing is concluded from silence, and the agent can be stopped."""
    state = cluster.directory / "gpus"
    write(state, "gpu1.hang 1\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(cluster.directory, REMAPPED_ROWS)))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(state))
    agent = cluster.start_agent("n1")
    await logged(cluster, "n1", "the NVIDIA driver has not answered for 10 s")
    await cluster.launch(node="n1", ranks=1)
    assert (await cluster.node("n1")).verdict == "alive"
    assert await cluster.client.observations() == ()
    agent.terminate()
    assert agent.wait(20) == 0


async def test_without_a_driver_one_line_says_so(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(no_driver(cluster.directory)))
    agent = cluster.start_agent("n1")
    await cluster.node("n1")
    await logged(cluster, "n1", "GPU health is not watched on this node")
    assert await cluster.client.observations() == ()
    agent.terminate()
    assert agent.wait(20) == 0
    (line,) = (line for line in cluster.log("n1").splitlines() if "GPU" in line)
    assert "INFO unicron_lib.agent.probe: GPU health is not watched on this node: no NVIDIA driver is installed" in line
