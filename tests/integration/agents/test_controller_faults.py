"""Agent and controller through each other's deaths and silences."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from local_cluster import LocalCluster, descendants, eventually, launch, pids

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import NodeUnreachable, Observation, StopRanks
from unicron_lib.controller.client import ControllerClient
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.errors import ControllerError, NodeNotConnected
from unicron_lib.journal import Journal


def journal(cluster: LocalCluster) -> Journal:
    return Journal(open_store(cluster.store_url))


def events(cluster: LocalCluster) -> list[str]:
    """The types of all journalled events, in order."""
    return [path.read_text().split('"type":"')[1].split('"')[0] for path in _entries(cluster)]


def _entries(cluster: LocalCluster) -> list[Path]:
    return sorted((cluster.directory / "store/journal").glob("*.json"))


async def test_observations_outlive_the_controller(cluster: LocalCluster) -> None:
    """PB47: made while the controller is dead, they arrive once, and only what was not acknowledged."""
    controller, _ = cluster.processes
    reply = await cluster.launch()
    os.kill(pids(reply)[0], signal.SIGKILL)
    first = await cluster.observation("rank_exited")
    assert await cluster.client.acknowledge([first.id]) == 1
    controller.kill()
    controller.wait()
    with pytest.raises(ControllerError, match="is it running"):
        await cluster.client.health()
    os.kill(pids(reply)[1], signal.SIGKILL)
    await cluster.start_controller()
    second = await cluster.observation("rank_exited")
    assert second.seq == first.seq + 1
    assert await cluster.client.acknowledge([second.id]) == 1
    await cluster.node(ranks=())
    assert await cluster.client.observations() == ()
    assert await cluster.client.command("n0", launch()) == reply, "the agent remembers its steps"
    assert events(cluster).count("node_joined") == 1
    assert journal(cluster).refresh().nodes["n0"].status is NodeStatus.READY


async def test_ranks_never_notice_that_the_controller_dies(cluster: LocalCluster) -> None:
    controller, _ = cluster.processes
    await cluster.launch()
    before = await cluster.client.job_progress("a", generation=1, world_size=2, wait_s=10)
    assert before is not None
    controller.kill()
    controller.wait()
    await cluster.start_controller()

    async def further() -> bool:
        now = await cluster.client.job_progress("a")
        return now is not None and now.iteration > before.iteration

    await eventually(further, "the same generation has gone on")


async def test_a_killed_agent_leaves_no_process(cluster: LocalCluster) -> None:
    agent = cluster.processes[1]
    await cluster.launch("obstinate", ranks=1)
    await cluster.client.job_progress("a", generation=1, world_size=1, wait_s=10)
    below = descendants(agent)
    assert len(below) >= 3, "fork server, rank and the rank's child"
    agent.kill()
    agent.wait()
    await eventually(lambda: _all_gone(below), "no process is left")
    lost = await cluster.observation("node_unreachable")
    assert isinstance(lost.body, NodeUnreachable)
    assert lost.body.jobs == ("a",)
    assert "ended without a goodbye" in lost.body.reason or "was reset" in lost.body.reason
    assert lost.body.silent_s >= 3.0
    assert await cluster.client.observations(job="b") == ()
    assert await cluster.client.observations(job="a") == (lost,)
    assert events(cluster) == ["node_joined", "node_suspected"]


async def _all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def test_an_agent_stops_although_its_controller_dies_at_the_same_moment(cluster: LocalCluster) -> None:
    controller, agent = cluster.processes
    await cluster.launch("step")
    controller.kill()
    agent.send_signal(signal.SIGINT)
    assert agent.wait(20) == 0


async def test_a_stopped_agent_leaves_no_process(cluster: LocalCluster) -> None:
    agent = cluster.processes[1]
    await cluster.launch("step")
    below = descendants(agent)
    assert len(below) == 3
    agent.send_signal(signal.SIGINT)
    assert agent.wait(20) == 0
    assert await _all_gone(below)
    assert await cluster.client.observations() == ()
    assert list((cluster.directory / "run/agents").iterdir()) == [], "nor the directory of its socket"
    assert "Traceback" not in cluster.log("n0")


async def test_a_node_loss_is_injected(cluster: LocalCluster) -> None:
    agent = cluster.processes[1]
    await cluster.launch("step")
    below = descendants(agent)
    assert (await cluster.client.command("n0", InjectFault(step="x", fault="node-loss"))).ok
    assert agent.wait(20) == -signal.SIGKILL
    await eventually(lambda: _all_gone(below), "no process is left")
    cluster.start_agent()
    await cluster.node(verdict="alive", ranks=())
    await eventually(lambda: _journalled(cluster, ["node_joined", "node_suspected", "node_joined"]), "its return")


async def test_a_node_that_was_declared_lost_starts_a_new_life(cluster: LocalCluster) -> None:
    """Its ranks may have been replaced elsewhere meanwhile, so that they must go; and suspicion comes before loss."""
    agent = cluster.processes[1]
    before = await cluster.node()
    reply = await cluster.launch()
    agent.send_signal(signal.SIGSTOP)
    for pid in pids(reply):
        os.kill(pid, signal.SIGSTOP)  # else their peers, were there any, would see them stepping
    lost = await cluster.observation("node_unreachable")
    assert isinstance(lost.body, NodeUnreachable)
    assert "its connection is open" in lost.body.reason
    agent.send_signal(signal.SIGCONT)
    after = await eventually(lambda: _other_life(cluster, before.boot), "a new life")
    assert after != before.boot
    assert not any(psutil.pid_exists(pid) for pid in pids(reply))
    assert (await cluster.client.command("n0", launch(generation=2))).ok


async def _other_life(cluster: LocalCluster, boot: str) -> str | None:
    node = await cluster.node()
    return node.boot if node.boot != boot and node.verdict == "alive" else None


async def test_a_short_silence_is_a_suspicion_that_is_cleared(cluster: LocalCluster) -> None:
    agent = cluster.processes[1]
    agent.send_signal(signal.SIGSTOP)
    await eventually(lambda: _journalled(cluster, ["node_joined", "node_suspected"]), "a suspicion")
    agent.send_signal(signal.SIGCONT)
    await cluster.node(verdict="alive")
    await eventually(lambda: _journalled(cluster, ["node_joined", "node_suspected", "node_cleared"]), "its end")
    assert journal(cluster).refresh().nodes["n0"].status is NodeStatus.READY
    assert await cluster.client.observations() == ()


async def test_a_node_whose_ranks_step_is_not_lost(cluster: LocalCluster) -> None:
    """Its agent is frozen for longer than the grace, but a peer on another node reports their common iterations."""
    frozen = cluster.start_agent("n1")
    await cluster.node("n1")
    await cluster.launch(ranks=1, world_size=2)
    await cluster.launch(node="n1", ranks=1, world_size=2, ranks_at=((1, 0),))
    await cluster.client.job_progress("a", generation=1, world_size=2, wait_s=10)
    frozen.send_signal(signal.SIGSTOP)

    async def vetoed() -> str | None:
        node = await cluster.node("n1")
        return node.reason if node.silent_s > 6.0 else None

    reason = await eventually(vetoed, "the grace is over")
    assert "job a, which needs its ranks, was seen finishing iteration" in reason
    assert await cluster.client.observations() == ()
    frozen.send_signal(signal.SIGCONT)
    await cluster.node("n1", verdict="alive")


async def _journalled(cluster: LocalCluster, wanted: list[str]) -> bool:
    return events(cluster) == wanted


async def test_a_node_that_was_known_before_a_restart_is_judged(cluster: LocalCluster) -> None:
    controller, agent = cluster.processes
    await eventually(lambda: _journalled(cluster, ["node_joined"]), "its arrival is known")
    controller.kill()
    controller.wait()
    agent.terminate()
    agent.wait()
    await cluster.start_controller()
    (node,) = await cluster.client.nodes()
    assert (node.connected, node.verdict) == (False, "alive"), "it gets the full grace"
    with pytest.raises(NodeNotConnected, match="n0 is not connected"):
        await cluster.client.command("n0", StopRanks(step="s", job="a", below_generation=1, grace_s=1))
    lost = await cluster.observation("node_unreachable")
    assert lost.node == "n0"
    assert lost.boot == node.boot


async def test_a_name_can_be_taken_only_once(cluster: LocalCluster) -> None:
    boot = (await cluster.node()).boot
    cluster.start_agent("n0", "--num-gpus", "7")

    async def told() -> bool:
        return "give each node its own name" in cluster.log("n0")

    await eventually(told, "the second one is told")
    assert (await cluster.node()).boot == boot
    cluster.processes[1].kill()
    await cluster.node(num_gpus=7)


async def test_a_wrong_token_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    intruder = cluster.start_agent("n1", token_file=wrong)
    assert intruder.wait(20) == 2
    assert cluster.log("n1").splitlines()[-1].startswith("unicron agent: the controller at ws://")
    assert "refused the token" in cluster.log("n1")
    assert [node.node for node in await cluster.client.nodes()] == ["n0"]
    async with ControllerClient(f"http://127.0.0.1:{cluster.port}", "wrong") as client:
        assert (await client.health()).ok
        for call in (client.nodes, client.progress, client.observations, lambda: client.acknowledge(["x"])):
            with pytest.raises(ControllerError, match="wrong token"):
                await call()
        with pytest.raises(ControllerError, match="wrong token"):
            await client.command("n0", InjectFault(step="x", fault="node-loss"))
    async with httpx.AsyncClient() as bare:
        assert (await bare.get(f"http://127.0.0.1:{cluster.port}/v1/nodes")).status_code == 401
    await cluster.node()


async def test_the_same_observation_comes_back_until_it_is_acknowledged(cluster: LocalCluster) -> None:
    await cluster.launch("finish", ranks=1)
    first = await cluster.observation("rank_finished")
    assert [type(o) for o in await cluster.client.observations(wait_s=5)] == [Observation]
    cluster.processes[0].kill()
    cluster.processes[0].wait()
    await cluster.start_controller()
    assert await cluster.observation("rank_finished") == first


def refuse(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


async def test_what_a_controller_cannot_start_with(cluster: LocalCluster, tmp_path: Path) -> None:
    """One clear line each."""
    port, token, store = str(cluster.port), str(cluster.token_file), cluster.store_url
    base = ("unicron_lib.controller", "--port")
    assert "cannot listen on" in refuse(*base, port, "--token-file", token, "--store-url", store)
    assert "cannot read the token file" in refuse(*base, "0", "--token-file", str(tmp_path / "none"), "--store-url", store)
    assert "is no object store" in refuse(*base, "0", "--token-file", token, "--store-url", "nonsense")
    (tmp_path / "file").write_text("x")
    assert "store" in refuse(*base, "0", "--token-file", token, "--store-url", f"file://{tmp_path}/file/below")
    agent = ("unicron_lib.agent", "--node", "n", "--address", "127.0.0.1", "--num-gpus", "1", "--run-dir", str(tmp_path))
    assert "token file" in refuse(*agent, "--controller", "ws://127.0.0.1:1/", "--token-file", str(tmp_path / "none"))
    assert "--node" in refuse(*agent, "--node", "a/b", "--controller", "ws://127.0.0.1:1/", "--token-file", token)
    assert "websocket address" in refuse(*agent, "--controller", "http://127.0.0.1:1/", "--token-file", token)
