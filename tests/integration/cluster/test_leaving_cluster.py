"""Nodes of a whole cluster leave, told by a spot notice and by SIGTERM: no iteration is lost, nothing counts as a restart."""

import psutil
import pytest
from whole_cluster import job_file

from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.local.processes import marked

SIZES = {"broad": 4, "narrow": 2}


@pytest.fixture(scope="module")
def twins(cluster, tmp_path_factory):
    """Two jobs of which each is worth more on 2 GPUs than the other on 4: both stay when a node of three leaves."""
    cluster.bring_back()
    end(cluster)
    for name, weight in (("broad", 1.1), ("narrow", 1.0)):
        keys = {"weight": weight, "throughput_flops": {2: 5.0e8, 4: 6.0e8}, "max_gpus": 4, "transition_s": 1.0}
        cluster.cli("submit", str(job_file(tmp_path_factory.mktemp("jobs"), name, **keys)))
    cluster.calm(SIZES)
    cluster.trains_on()
    yield cluster
    end(cluster)


def end(cluster):
    for name in [name for name, job in cluster.state.jobs.items() if job.wants_gpus]:
        cluster.cli("cancel", name)
    cluster.calm({})


def home_of(cluster, job):
    (node,) = cluster.state.jobs[job].assignment.nodes
    return node


def agent_of(cluster, node) -> psutil.Process:
    """By its command line: `--node NAME`."""
    for process in marked(cluster.site.cluster_id):
        line = process.cmdline()
        if "unicron_lib.agent" in line and line[line.index("--node") + 1] == node:
            return process
    raise AssertionError(f"no agent of {node}")


def answered(cluster, node):
    """The results by job and kind of the plan for the leave of `node`, once it is complete."""
    asked = [it for it in cluster.state.incidents.values() if (it.kind, it.node) == ("leave_announced", node)]
    plan = cluster.state.plans[max(asked, key=lambda it: it.opened_at).plan]
    return {(step.job, step.kind): plan.results[step.id] for step in plan.plan.steps}


def nothing_is_lost(cluster, node):
    results = answered(cluster, node)
    for name in SIZES:
        parted, went_on = results[name, StepKind.DRAIN], results[name, StepKind.RESUME]
        assert went_on["went_on_after"] == parted["iteration"], name
    # all of one job was on the node: its ranks have saved and committed; of the other one those that stay live on
    moved = [name for name in SIZES if results[name, StepKind.DRAIN]["source"] == "drained"]
    assert len(moved) == 1
    assert results[moved[0], StepKind.DRAIN]["manifest"]
    assert [results[name, StepKind.DRAIN].get("held") for name in SIZES if name not in moved] == [2]


def nothing_counts(cluster, known):
    state = cluster.state
    assert cluster.new_failures(known) == []
    assert state.breaker_since is None
    for name in SIZES:
        assert (state.jobs[name].failed_times, state.jobs[name].stuck_restarts) == ((), 0)


def ends_and_comes_back(twins, node: str, known: set[str]) -> None:
    state = twins.until("the end of the node", lambda state: state.nodes[node].status is NodeStatus.LOST)
    assert state.nodes[node].has_left
    twins.cli("up")
    twins.calm(SIZES)
    nothing_counts(twins, known)
    twins.check_journal()


def test_a_spot_notice_moves_the_jobs_and_costs_nothing(twins):
    known, node = set(twins.state.incidents), home_of(twins, "narrow")
    twins.cli("inject", "spot-notice", node)
    twins.calm({"broad": 2, "narrow": 2})
    twins.trains_on()
    nothing_is_lost(twins, node)
    row = next(row for row in twins.json("nodes")["nodes"] if row["node"] == node)
    assert (row["status"], row["jobs"], row["reason"]) == ("leaving", "", "a spot interruption notice was injected")
    assert row["until"].endswith(" UTC")
    assert f"{node} leaves: a spot interruption notice was injected" in " ".join(twins.cli("explain", "last").stdout.split())
    agent_of(twins, node).terminate()
    ends_and_comes_back(twins, node, known)


@pytest.mark.storm
def test_sigterm_to_an_agent_saves_its_ranks_before_it_ends(twins):
    known, node = set(twins.state.incidents), home_of(twins, "narrow")
    agent_of(twins, node).terminate()
    twins.calm({"broad": 2, "narrow": 2})
    nothing_is_lost(twins, node)
    ends_and_comes_back(twins, node, known)
