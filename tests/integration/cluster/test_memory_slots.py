"""States in the memory of nodes: all ranks of a job die, or the only node that has any, and hardly an iteration is lost."""

import os
import signal

import pytest
from whole_cluster import job_file

from unicron_lib.agent.memory_messages import FindMemory
from unicron_lib.agent.slot_places import slot_directory
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import StepKind

JOB, INTERVAL = "kept", 2


@pytest.fixture
def kept(cluster, tmp_path):
    """A job on the two GPUs of one node, which would save for the first time in hours."""
    cluster.bring_back()
    running = {name for name, job in cluster.state.jobs.items() if job.status is JobStatus.RUNNING}
    for name in running - {JOB}:
        cluster.cli("cancel", name)
    if JOB not in running:
        keys = {"max_gpus": 2, "throughput_flops": {2: 5.0e8}, "save_interval": 100_000, "memory_interval": INTERVAL}
        cluster.cli("submit", str(job_file(tmp_path, JOB, **keys)))
    cluster.calm({JOB: 2})
    assert len(cluster.state.jobs[JOB].nodes) == 1
    cluster.wait("some iterations", lambda: iteration(cluster) >= 10)
    return cluster


def iteration(cluster):
    return next((it.iteration for it in cluster.ask(lambda client: client.progress()) if it.job == JOB), -1)


def held(cluster, node):
    """The iterations of the job that are whole in the memory of a node."""
    command = FindMemory(step=f"look-{node}", job=JOB)
    reply = cluster.ask(lambda client: client.command(node, command))
    return sorted(slot["iteration"] for slot in reply.result["slots"])


def told(cluster, known):
    """What RESTORE and RESUME tell of the answer to the newest failure."""
    (incident,) = [it for it in cluster.new_failures(known) if it.status == "closed"]
    plan = cluster.state.plans[incident.plan]
    results = {step.kind: plan.results[step.id] for step in plan.plan.steps if step.job == JOB}
    return incident, results[StepKind.RESTORE], results[StepKind.RESUME]


def test_all_ranks_of_a_job_are_killed(kept):
    known = set(kept.state.incidents)
    ranks = [it for node in kept.ask(lambda client: client.nodes()) for it in node.ranks if it.job == JOB]
    reached = iteration(kept)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    kept.until("the failure", lambda _: kept.new_failures(known))
    kept.calm({JOB: 2})
    incident, restored, resumed = told(kept, known)
    (node,) = kept.state.jobs[JOB].nodes
    assert restored["memory"] == f"memory of {node}"
    assert restored["fallback_iteration"] == -1
    assert resumed["went_on_after"] == restored["iteration"] >= reached - INTERVAL
    assert resumed["from"].startswith(f"slot of {node} for 2 ranks")
    assert f"memory of {node}" in kept.cli("explain", incident.id).stdout
    kept.trains_on()
    kept.check_journal()


def test_the_only_node_of_a_job_is_lost(kept):
    known = set(kept.state.incidents)
    (node,) = kept.state.jobs[JOB].nodes
    others = set(kept.state.nodes) - {node}
    kept.wait("a copy on another node", lambda: any(held(kept, other) for other in others))
    copied = max(max(held(kept, other), default=-1) for other in others)
    kept.cli("inject", "node-loss", node)
    kept.until("the failure", lambda _: kept.new_failures(known))
    kept.calm({JOB: 2})
    _, restored, resumed = told(kept, known)
    assert restored["memory"].startswith("memory of node-")
    assert resumed["went_on_after"] == restored["iteration"] >= copied > 0
    assert "slot of " in resumed["from"]
    kept.trains_on()
    kept.check_journal()


def test_a_job_saves_when_it_is_told_to(kept):
    said = kept.json("checkpoint", JOB)
    assert said["iteration"] > 0 < said["bytes"]
    rows = kept.json("checkpoints", JOB)["checkpoints"]
    assert [(row["iteration"], row["state"]) for row in rows] == [(said["iteration"], "newest")]
    kept.trains_on()
    assert "no job 'nobody' is running: those that are: kept" in kept.cli("checkpoint", "nobody", code=2).stderr


def test_what_has_ended_leaves_nothing_in_memory(kept):
    kept.cli("cancel", JOB)
    directories = [slot_directory(kept.site.run_dir, node) for node in kept.state.nodes]
    kept.wait("no slot is left", lambda: not [slot for directory in directories for slot in directory.glob(f"{JOB}/*")])
