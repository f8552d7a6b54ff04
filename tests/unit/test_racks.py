"""The rack of a node: from the agent's option through hello and journal to the placement."""

import asyncio
import time
from pathlib import Path

from unicron_lib.adapters.files import FileStore
from unicron_lib.agent import __main__ as agent
from unicron_lib.agent.messages import AgentHello
from unicron_lib.config import Settings
from unicron_lib.controller.hub import Link
from unicron_lib.controller.recorder import Recorder
from unicron_lib.controller.service import Controller
from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.jobs import JobSpec, JobState
from unicron_lib.domain.plans import PlanKind
from unicron_lib.journal import Journal
from unicron_lib.planning.placement import Rules
from unicron_lib.planning.planner import make_plan


def cluster(*racks: str) -> ClusterState:
    nodes = [Node(id=f"n{i}", boot="b", address="x", num_gpus=2, rack=rack) for i, rack in enumerate(racks)]
    jobs = {name: JobState(spec=JobSpec(job=name, throughput_flops={4: 1e9})) for name in ("a", "b")}
    return ClusterState(nodes={node.id: node for node in nodes}, jobs=jobs)


def plan_on(state: ClusterState, rules: Rules) -> list[set[str]]:
    respond = Respond(kind=PlanKind.REALLOCATE, incidents=("i",), attempt=1, reason="jobs are new")
    plan = make_plan(state, respond, measured={}, mtbf_gpu_s=6.2e7, rules=rules, timer=time.perf_counter)
    return [set(assignment.nodes) for assignment in plan.assignments]


def test_jobs_are_kept_within_racks() -> None:
    assert plan_on(cluster("x", "y", "x", "y"), Rules()) == [{"n0", "n2"}, {"n1", "n3"}]
    assert plan_on(cluster("", "", "", ""), Rules()) == [{"n0", "n1"}, {"n2", "n3"}]


def test_a_limit_of_jobs_keeps_them_on_nodes_of_their_own() -> None:
    state = cluster("", "", "")
    nodes = {name: Node(id=name, boot="b", address="x", num_gpus=8) for name in state.nodes}
    wide = ClusterState(nodes=nodes, jobs=state.jobs)
    assert plan_on(wide, Rules()) == [{"n0"}, {"n0"}]
    assert plan_on(wide, Rules(max_jobs_per_node=1)) == [{"n0"}, {"n1"}]


def test_the_limit_is_a_setting(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    env = {"UNICRON_STORE_URL": "file:///x", "UNICRON_CONTROLLER_URL": "http://x", "UNICRON_TOKEN_FILE": str(token)}
    assert Settings.from_env(env).max_jobs_per_node == 0
    assert Settings.from_env(env | {"UNICRON_MAX_JOBS_PER_NODE": "3"}).max_jobs_per_node == 3


def test_the_agent_says_its_rack(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    words = f"--controller ws://x/v1/agents --token-file {tmp_path / 'token'} --node n --address x --num-gpus 0 --rack r7"
    options = agent._parser().parse_args([*words.split(), "--run-dir", str(tmp_path / "run")])
    assert agent._agent_options(options).facts.rack == "r7"


async def test_the_journal_remembers_the_rack(tmp_path: Path) -> None:
    journal = Journal(FileStore(tmp_path))
    controller = Controller(Recorder(journal))
    writing = asyncio.create_task(controller.recorder.run())
    line = link()
    hello = AgentHello(node="n", boot="b", address="x", num_gpus=1, rack="r7")
    assert await controller.admit(await controller.arrive(hello, line), line) is None
    assert journal.refresh().nodes["n"].rack == "r7"
    writing.cancel()


def link() -> Link:
    async def ignore(*_: object) -> None:
        """Nobody is at the other end."""

    return Link(send=ignore, close=ignore)
