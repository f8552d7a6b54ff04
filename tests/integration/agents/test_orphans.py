"""Nothing that a dead agent or a dead rank has left behind lives on when ranks are started, and nobody else is touched."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from local_cluster import LocalCluster, descendants, eventually, pids

from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.lives import Life, is_alive, life_of, marks_of
from unicron_lib.agent.messages import RankExited, StopRanks
from unicron_lib.agent.orphans import Orphans
from unicron_lib.agent.register import Register, read_register


@contextmanager
def sleeping(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], env=os.environ | environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    return life_of(pid) is not None


async def children(cluster: LocalCluster, job: str) -> list[int]:
    """What the rank of `job` has started, once it steps."""
    seen = await cluster.client.job_progress(job, generation=1, world_size=1, wait_s=10)
    assert seen is not None
    found = [int(pid) for pid in (cluster.directory / f"run/children-{job}").read_text().split()]
    assert len(found) == 2
    assert all(alive(pid) for pid in found)
    return found


async def test_pb15_a_killed_agents_processes_are_gone_before_a_relaunch(cluster: LocalCluster) -> None:
    """PB15: SIGKILL of the agent; its rank's children are in sessions of their own; others of the same user stay."""
    with sleeping() as unrelated, sleeping(UNICRON_JOB_ID="a", UNICRON_NODE="n0") as similar:
        reply = await cluster.launch("parent", ranks=1)
        left = await children(cluster, "a")
        agent = cluster.processes[1]
        everybody = [*left, *pids(reply), *(process.pid for process in descendants(agent))]
        agent.kill()
        agent.wait()
        cluster.start_agent()

        async def joined() -> bool:
            (node,) = await cluster.client.nodes()
            return node.connected and not node.ranks

        await eventually(joined, "the new agent joins")
        assert not [pid for pid in everybody if alive(pid)]
        assert (unrelated.poll(), similar.poll()) == (None, None)
        assert not list((cluster.directory / "run/agents").glob(f"n0-{agent.pid}*")), "nothing of the dead agent is left"
        await cluster.launch("step", ranks=1, generation=2)
        assert await cluster.client.job_progress("a", generation=2, world_size=1, wait_s=10)


async def test_a_dead_ranks_children_go_with_it_and_those_of_others_stay(cluster: LocalCluster) -> None:
    reply = await cluster.launch("parent", ranks=1, job="a")
    mine = await children(cluster, "a")
    await cluster.launch("parent", ranks=1, job="b")
    others = await children(cluster, "b")
    began = time.monotonic()
    os.kill(pids(reply)[0], signal.SIGKILL)
    seen = await cluster.observation("rank_exited", "a")
    print(f"seen {1000 * (time.monotonic() - began):.1f} ms after the kill, a child holds the connection")  # noqa: T201
    assert isinstance(seen.body, RankExited)
    assert seen.body.exit_code == -9
    assert all(alive(pid) for pid in mine), "their sessions are their own: killing the group is not enough"
    stopped = await cluster.client.command("n0", StopRanks(step="stop", job="a", below_generation=2, grace_s=5))
    assert stopped.ok
    await cluster.launch("step", ranks=1, job="a", generation=2)
    assert not [pid for pid in mine if alive(pid)]
    assert all(alive(pid) for pid in others), "the other job was not touched"


async def test_a_living_agents_processes_are_not_orphans(cluster: LocalCluster) -> None:
    """Also not to a second agent of the same node, which somebody has started by mistake."""
    reply = await cluster.launch("parent", ranks=1)
    left = await children(cluster, "a")
    facts = NodeFacts(node="n0", address="127.0.0.1", num_gpus=2, run_dir=(cluster.directory / "run").resolve())
    await Orphans(facts).clear()
    assert all(alive(pid) for pid in [*left, *pids(reply)])


def test_every_process_is_marked_with_its_owner(tmp_path: Path) -> None:
    """By the fork server's child itself, in what the kernel shows of it and of all that descends from it."""
    show = "import os; print(open(f'/proc/{os.getpid()}/environ').read().split('UNICRON_OWNER=')[1][:40].strip())"
    script = f"""import os, subprocess, sys
from unicron_lib.agent.marks import own_descendants
own_descendants('77:88')
{show}
if os.fork() == 0:
    {show}
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', {show!r}])
"""
    marks = Orphans(NodeFacts(node="n", address="a", num_gpus=0, run_dir=tmp_path)).environment
    told = subprocess.run(
        [sys.executable, "-uc", script], env=os.environ | marks, capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == ["77:88"] * 3


@pytest.fixture
def facts(tmp_path: Path) -> NodeFacts:
    return NodeFacts(node="n0", address="127.0.0.1", num_gpus=0, run_dir=tmp_path)


def dead_life() -> Life:
    with sleeping() as process:
        life = life_of(process.pid)
    assert life is not None
    assert not is_alive(life)
    return life


async def test_marks_decide_who_is_an_orphan(facts: NodeFacts, tmp_path: Path) -> None:
    me = str(life_of(os.getpid()))
    node = {"UNICRON_NODE": "n0", "UNICRON_RUN_DIR": str(tmp_path)}
    dead, recycled = str(dead_life()), f"{os.getpid()}:1"
    stories = {
        "of a dead agent": (node | {"UNICRON_AGENT": dead}, False),
        "of an agent whose number is somebody else's now": (node | {"UNICRON_AGENT": recycled}, False),
        "of a dead rank": (node | {"UNICRON_AGENT": me, "UNICRON_OWNER": dead}, False),
        "of a rank whose number is somebody else's now": (node | {"UNICRON_AGENT": me, "UNICRON_OWNER": recycled}, False),
        "of a living rank": (node | {"UNICRON_AGENT": me, "UNICRON_OWNER": me}, True),
        "our fork server": (node | {"UNICRON_AGENT": me, "UNICRON_OWNER": " " * 40}, True),
        "of another node": (node | {"UNICRON_AGENT": dead, "UNICRON_NODE": "n1"}, True),
        "of another cluster": (node | {"UNICRON_AGENT": dead, "UNICRON_RUN_DIR": "/else"}, True),
        "of another living agent": (node | {"UNICRON_AGENT": str(life_of(os.getppid())), "UNICRON_OWNER": dead}, True),
        "with a strange mark": (node | {"UNICRON_AGENT": "me"}, True),
        "without a mark": ({}, True),
    }
    with ExitStack() as stack:
        running = {story: stack.enter_context(sleeping(**marks)) for story, (marks, _) in stories.items()}

        async def executed() -> bool:
            return all(marks_of(running[story].pid) == marks for story, (marks, _) in stories.items())

        await eventually(executed, "all have become what they are to be")
        await Orphans(facts).clear()
        assert {story: alive(process.pid) for story, process in running.items()} == {
            story: stays for story, (_, stays) in stories.items()
        }


async def test_what_hides_its_environment_is_found_in_the_register(facts: NodeFacts, tmp_path: Path) -> None:
    with sleeping() as hidden, sleeping() as recycled:
        life, other = life_of(hidden.pid), life_of(recycled.pid)
        assert life is not None
        assert other is not None
        register = Register(tmp_path / "agents/n0-7.pids", node="n0", agent=dead_life())
        register.add(life)
        register.add(Life(pid=other.pid, start=other.start - 1))
        with (tmp_path / "agents/n0-7.pids").open("a") as file:
            file.write("12")  # the power went away here
        (tmp_path / "agents/n0-7").mkdir()
        await Orphans(facts).clear()
        assert hidden.wait() == -signal.SIGKILL
        assert recycled.poll() is None, "the number is somebody else's by now"
    assert not list((tmp_path / "agents").iterdir())


async def test_registers_of_others_are_left_alone(facts: NodeFacts, tmp_path: Path) -> None:
    agents = tmp_path / "agents"
    with sleeping() as process:
        life, me = life_of(process.pid), life_of(os.getppid())
        assert life is not None
        assert me is not None
        Register(agents / "n0-1.pids", node="n0", agent=me).add(life)
        Register(agents / "n0-x-2.pids", node="n0-x", agent=dead_life()).add(life)
        (agents / "n0-3.pids").write_text("no JSON\n1:2\n")
        (agents / "n0-4.pids").write_text('{"node": "n0", "boot": "an earlier one", "agent": "1:1"}\n' + f"{life}\n")
        (agents / "n0-5.pids").write_text("")
        await Orphans(facts).clear()
        assert process.poll() is None
    assert sorted(path.name for path in agents.iterdir()) == ["n0-1.pids", "n0-3.pids", "n0-5.pids", "n0-x-2.pids"]
    assert read_register(agents / "n0-5.pids", node="n0") is None


def test_a_life_is_its_number_and_its_start() -> None:
    me = life_of(os.getpid())
    assert me is not None
    assert Life.read(str(me)) == me
    assert abs(me.start / os.sysconf("SC_CLK_TCK") + psutil.boot_time() - psutil.Process().create_time()) < 2
    assert [Life.read(text) for text in ("", "1", "a:b", "1:2:3", "-1:2", "²:1")] == [None] * 6
    assert life_of(2**22 + 1) is None
