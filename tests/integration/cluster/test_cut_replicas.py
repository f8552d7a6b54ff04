"""Jobs whose replicas are two ranks each, on a whole cluster: they outlive a rank's crash, all ranks' and a node's loss."""

import os
import signal

import pytest
from whole_cluster import job_file

from unicron_lib.agent.memory_messages import FindMemory
from unicron_lib.domain.plans import Layout, StepKind

pytestmark = [pytest.mark.timeout(600), pytest.mark.storm]
INTERVAL = 2


def kill_all(cluster) -> None:
    for node in cluster.ask(lambda client: client.nodes()):
        for rank in node.ranks:
            if rank.job == "cut":
                os.kill(rank.pid, signal.SIGKILL)


def healed(cluster, job: str, gpus: int, known: set[str]):
    """What RESTORE and RESUME tell of the answer to the failure that is not among the known ones."""
    cluster.until("the failure", lambda _: cluster.new_failures(known))
    cluster.calm({job: gpus})
    (incident,) = [it for it in cluster.new_failures(known) if it.status == "closed"]
    plan = cluster.state.plans[incident.plan]
    results = {step.kind: plan.results[step.id] for step in plan.plan.steps if step.job == job}
    return results[StepKind.RESTORE], results[StepKind.RESUME]


def submit(cluster, tmp_path, job: str, gpus: int) -> None:
    """A job alone on the whole cluster, two ranks a replica, that would save for the first time in hours."""
    cluster.bring_back()
    for row in cluster.json("jobs")["jobs"]:
        if row["status"] == "running":
            cluster.cli("cancel", row["job"])
    keys = {"tensor_model_parallel_size": 2, "max_gpus": gpus, "throughput_flops": {2: 5.0e8, 4: 9.0e8}, "transition_s": 1.0}
    saving = {"save_interval": 100_000, "memory_interval": INTERVAL}
    cluster.cli("submit", str(job_file(tmp_path, job, params_dtype="float64", **keys, **saving)))
    cluster.calm({job: gpus})
    cluster.trains_on()


@pytest.fixture
def cut(cluster, tmp_path):
    submit(cluster, tmp_path, "cut", 4)
    yield
    cluster.cli("cancel", "cut")


@pytest.mark.usefixtures("cut")
def test_a_job_with_tensor_parallelism_survives_a_crash_and_a_lost_node(cluster) -> None:
    assert cluster.state.jobs["cut"].assignment.layout == Layout(tp=2, dp=2)
    known, reached = set(cluster.state.incidents), cluster.iterations()["cut"]
    cluster.cli("inject", "crash", "cut/1")
    restored, resumed = healed(cluster, "cut", 4, known)
    assert "memory" not in restored, "the other replica lives"
    assert resumed["went_on_after"] >= reached
    cluster.trains_on()
    known, reached = set(cluster.state.incidents), cluster.iterations()["cut"]
    kill_all(cluster)
    restored, resumed = healed(cluster, "cut", 4, known)
    assert restored["memory"].startswith("memory of node-")
    assert restored["fallback_iteration"] == -1
    assert resumed["went_on_after"] == restored["iteration"] >= reached - INTERVAL
    cluster.trains_on()
    node = cluster.state.jobs["cut"].assignment.nodes[1]
    cluster.cli("inject", "node-loss", node)
    cluster.until("the loss", lambda state: state.num_healthy_gpus == 4)
    cluster.calm({"cut": 4})
    cluster.trains_on()


def copied(cluster, job: str, node: str) -> int:
    """The newest iteration that another node has both parts of, -1 for none."""
    found = [-1]
    for other in sorted(cluster.state.nodes.keys() - {node}):
        command = FindMemory(step=f"look-{other}", job=job)
        slots = cluster.ask(lambda client, other=other, command=command: client.command(other, command)).result["slots"]
        parts = [{slot["iteration"] for slot in slots if slot["part"] == part} for part in Layout(tp=2).parts]
        found += set.intersection(*parts)
    return max(found)


@pytest.fixture
def lone(cluster, tmp_path):
    submit(cluster, tmp_path, "lone", 2)
    yield
    cluster.cli("cancel", "lone")


@pytest.mark.usefixtures("lone")
def test_the_only_replica_goes_on_from_parts_in_memory_here_and_elsewhere(cluster) -> None:
    (node,) = cluster.state.jobs["lone"].nodes
    cluster.wait("some iterations", lambda: cluster.iterations()["lone"] > 2 * INTERVAL)
    known, reached = set(cluster.state.incidents), cluster.iterations()["lone"]
    cluster.cli("inject", "crash", "lone/1")
    restored, resumed = healed(cluster, "lone", 2, known)
    assert restored["memory"].startswith("memory of node-"), "the copies may be newer than what the killed rank has completed"
    assert resumed["went_on_after"] == restored["iteration"] >= reached - INTERVAL
    assert f"slot of {node} for" in resumed["from"]
    cluster.wait("a copy on another node", lambda: copied(cluster, "lone", node) >= 0)
    known, reached = set(cluster.state.incidents), copied(cluster, "lone", node)
    cluster.cli("inject", "node-loss", node)
    restored, resumed = healed(cluster, "lone", 2, known)
    assert restored["memory"].startswith("memory of node-")
    assert resumed["went_on_after"] == restored["iteration"] >= reached
    cluster.trains_on()
    cluster.check_journal()
    logs = [log for job in ("cut", "lone") for log in (cluster.site.run_dir / "logs" / job).glob("g*-r*.log")]
    assert not [log for log in logs if "Traceback" in log.read_text()]
