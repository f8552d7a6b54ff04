"""A job that may be cut in two ways, on a whole cluster: a lost node changes its layout, the node's return changes it back."""

import json
from itertools import islice
from pathlib import Path

import pytest
from whole_cluster import Cluster, job_file

from unicron_lib.agent.memory_messages import FindMemory
from unicron_lib.domain.plans import Layout, StepKind
from unicron_lib.jobfile import read_jobs
from unicron_lib.local.checks import loss_curve
from unicron_lib.training.ledger import ledger_directory
from unicron_lib.training.reference import losses

pytestmark = [pytest.mark.timeout(600), pytest.mark.storm]
STAGES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "throughput_flops": {6: 9.0e8}}
LINES = {"tensor_model_parallel_size": 2, "throughput_flops": {2: 3.0e8, 4: 5.0e8}}


def iterations_of(directory: Path, generation: int) -> set[int]:
    lines = [line for file in directory.glob(f"g{generation}-r*.jsonl") for line in file.read_text().splitlines()]
    return {json.loads(line)["iteration"] for line in lines}


def copied(cluster: Cluster, node: str) -> int:
    """The newest iteration of which others than `node` have all parts that its ranks have, -1 for none."""
    assignment = cluster.state.jobs["recut"].assignment
    slots = [
        slot
        for other in sorted(set(assignment.nodes) - {node})
        for slot in cluster.ask(
            lambda client, other=other: client.command(other, FindMemory(step=f"look-{other}", job="recut"))
        ).result["slots"]
    ]
    parts = [assignment.layout.part(rank) for rank, _ in assignment.ranks_on(node)]
    return max(set.intersection(*({slot["iteration"] for slot in slots if slot["part"] == part} for part in parts)), default=-1)


def trained(cluster: Cluster, layout: Layout, num_iterations: int) -> set[int]:
    """Wait until the job has done so many iterations in `layout`; the iterations of that generation until now."""
    job = cluster.calm({"recut": layout.num_gpus}).jobs["recut"]
    assert job.assignment.layout == layout
    directory = ledger_directory(cluster.site.run_dir, "recut")
    cluster.until("iterations", lambda _: len(iterations_of(directory, job.generation)) >= num_iterations)
    return iterations_of(directory, job.generation)


def told(cluster: Cluster) -> tuple[dict, dict]:
    """What RESTORE and RESUME of the job's newest plan tell."""
    plan = next(it for it in reversed(cluster.state.plans.values()) if it.plan.assignment_of("recut"))
    results = {step.kind: plan.results[step.id] for step in plan.plan.steps if step.job == "recut"}
    return results[StepKind.RESTORE], results[StepKind.RESUME]


def test_a_lost_node_changes_the_layout_and_its_return_changes_it_back(cluster, tmp_path) -> None:
    cluster.bring_back()
    for name in [name for name, job in cluster.state.jobs.items() if job.status == "running"]:
        cluster.cli("cancel", name)
    keys = {"num_layers": 3, "params_dtype": "float64", "transition_s": 1.0, "save_interval": 100_000, "memory_interval": 1}
    file = job_file(tmp_path, "recut", parallel_layouts=[STAGES, LINES], **keys)
    cluster.cli("submit", str(file))
    trained(cluster, Layout(tp=2, pp=3), 12)
    node = cluster.state.jobs["recut"].assignment.nodes[1]
    cluster.wait("copies of its stage", lambda: copied(cluster, node) >= 0)
    least = copied(cluster, node)
    cluster.cli("inject", "node-loss", node)
    cluster.until("the loss", lambda state: state.num_healthy_gpus == 4)
    trained(cluster, Layout(tp=2, dp=2), 3)
    restored, resumed = told(cluster)
    assert restored["memory"].endswith("resharded from tp=2 pp=3"), "only another node has the second stage, in its memory"
    assert restored["fallback_iteration"] == -1, "nothing was ever saved"
    assert resumed["went_on_after"] == restored["iteration"] >= least
    assert "resharded from tp=2 pp=3" in resumed["from"]
    smaller = cluster.state.jobs["recut"].generation
    cluster.cli("up")
    cluster.until("the node", lambda state: state.num_healthy_gpus == 6)
    last = trained(cluster, Layout(tp=2, pp=3), 3)
    done = iterations_of(ledger_directory(cluster.site.run_dir, "recut"), smaller)
    assert min(last) == max(done) + 1, "healthy ranks save before they change: nothing is done twice"
    restored, resumed = told(cluster)
    assert restored["iteration"] == restored["fallback_iteration"] == resumed["went_on_after"] == max(done)
    assert "resharded from tp=2 pp=1" in resumed["from"], "what they have saved they have kept, too"
    cluster.cli("cancel", "recut")
    cluster.check_journal()
    (spec,) = read_jobs(file)
    curve = loss_curve(cluster.site.run_dir, "recut")
    undisturbed = list(islice(losses(spec), max(last)))
    assert [curve[iteration] for iteration in range(len(undisturbed))] == pytest.approx(undisturbed, rel=1e-9)
