"""A job whose replicas are two ranks each, on a whole cluster: it outlives a rank's crash, all ranks' and a node's loss."""

import os
import signal

import pytest
from whole_cluster import job_file

from unicron_lib.domain.plans import Layout, StepKind

pytestmark = pytest.mark.timeout(600)
INTERVAL = 2


def kill_all(cluster) -> None:
    for node in cluster.ask(lambda client: client.nodes()):
        for rank in node.ranks:
            if rank.job == "cut":
                os.kill(rank.pid, signal.SIGKILL)


def healed(cluster, known: set[str]):
    """What RESTORE and RESUME tell of the answer to the failure that is not among the known ones."""
    cluster.until("the failure", lambda _: cluster.new_failures(known))
    cluster.calm({"cut": 4})
    (incident,) = [it for it in cluster.new_failures(known) if it.status == "closed"]
    plan = cluster.state.plans[incident.plan]
    results = {step.kind: plan.results[step.id] for step in plan.plan.steps if step.job == "cut"}
    return results[StepKind.RESTORE], results[StepKind.RESUME]


def test_a_job_with_tensor_parallelism_survives_a_crash_and_a_lost_node(cluster, tmp_path) -> None:
    cluster.cli("up")
    cluster.until("all nodes", lambda state: state.num_healthy_gpus == 6)
    running = [row["job"] for row in cluster.json("jobs")["jobs"] if row["status"] == "running"]
    for job in running:
        cluster.cli("cancel", job)
    keys = {"tensor_model_parallel_size": 2, "max_gpus": 4, "throughput_flops": {2: 5.0e8, 4: 9.0e8}, "transition_s": 1.0}
    saving = {"save_interval": 100_000, "memory_interval": INTERVAL}
    cluster.cli("submit", str(job_file(tmp_path, "cut", params_dtype="float64", **keys, **saving)))
    cluster.calm({"cut": 4})
    assert cluster.state.jobs["cut"].assignment.layout == Layout(tp=2, dp=2)
    cluster.trains_on()
    known, reached = set(cluster.state.incidents), cluster.iterations()["cut"]
    cluster.cli("inject", "crash", "cut/1")
    restored, resumed = healed(cluster, known)
    assert "memory" not in restored, "the other replica lives"
    assert resumed["went_on_after"] >= reached
    cluster.trains_on()
    known, reached = set(cluster.state.incidents), cluster.iterations()["cut"]
    kill_all(cluster)
    restored, resumed = healed(cluster, known)
    assert restored["memory"].startswith("memory of node-")
    assert restored["fallback_iteration"] == -1
    assert resumed["went_on_after"] == restored["iteration"] >= reached - INTERVAL
    cluster.trains_on()
    node = cluster.state.jobs["cut"].assignment.nodes[1]
    cluster.cli("inject", "node-loss", node)
    cluster.until("the loss", lambda state: state.num_healthy_gpus == 4)
    cluster.calm({"cut": 4})
    cluster.trains_on()
    cluster.check_journal()
    for log in (cluster.site.run_dir / "logs" / "cut").glob("g*-r*.log"):
        assert "Traceback" not in log.read_text()
    cluster.cli("cancel", "cut")
