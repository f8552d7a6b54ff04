"""A job that may be cut in two ways, on a whole cluster: a lost node changes its layout, the node's return changes it back."""

import json
from itertools import islice
from pathlib import Path

import pytest
from whole_cluster import Cluster, job_file

from unicron_lib.domain.plans import Layout
from unicron_lib.jobfile import read_jobs
from unicron_lib.local.checks import loss_curve
from unicron_lib.training.ledger import ledger_directory
from unicron_lib.training.reference import losses

pytestmark = pytest.mark.timeout(600)
STAGES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "throughput_flops": {6: 9.0e8}}
LINES = {"tensor_model_parallel_size": 2, "throughput_flops": {2: 3.0e8, 4: 5.0e8}}


def iterations_of(directory: Path, generation: int) -> set[int]:
    lines = [line for file in directory.glob(f"g{generation}-r*.jsonl") for line in file.read_text().splitlines()]
    return {json.loads(line)["iteration"] for line in lines}


def trained(cluster: Cluster, layout: Layout, num_iterations: int) -> set[int]:
    """Wait until the job has done so many iterations in `layout`; the iterations of that generation until now."""
    job = cluster.calm({"recut": layout.num_gpus}).jobs["recut"]
    assert job.assignment.layout == layout
    directory = ledger_directory(cluster.site.run_dir, "recut")
    cluster.until("iterations", lambda _: len(iterations_of(directory, job.generation)) >= num_iterations)
    return iterations_of(directory, job.generation)


def test_a_lost_node_changes_the_layout_and_its_return_changes_it_back(cluster, tmp_path) -> None:
    cluster.cli("up")
    cluster.until("all nodes", lambda state: state.num_healthy_gpus == 6)
    for name in [name for name, job in cluster.state.jobs.items() if job.status == "running"]:
        cluster.cli("cancel", name)
    keys = {"num_layers": 3, "params_dtype": "float64", "save_interval": 5, "transition_s": 1.0}
    file = job_file(tmp_path, "recut", parallel_layouts=[STAGES, LINES], **keys)
    cluster.cli("submit", str(file))
    trained(cluster, Layout(tp=2, pp=3), 12)
    cluster.cli("inject", "node-loss", cluster.state.jobs["recut"].assignment.nodes[1])
    cluster.until("the loss", lambda state: state.num_healthy_gpus == 4)
    trained(cluster, Layout(tp=2, dp=2), 3)  # nobody has the second stage any more: from the newest checkpoint
    smaller = cluster.state.jobs["recut"].generation
    cluster.cli("up")
    cluster.until("the node", lambda state: state.num_healthy_gpus == 6)
    last = trained(cluster, Layout(tp=2, pp=3), 3)
    done = iterations_of(ledger_directory(cluster.site.run_dir, "recut"), smaller)
    assert min(last) == max(done) + 1, "healthy ranks save before they change: nothing is done twice"
    cluster.cli("cancel", "recut")
    cluster.check_journal()
    (spec,) = read_jobs(file)
    curve = loss_curve(cluster.site.run_dir, "recut")
    undisturbed = list(islice(losses(spec), max(last)))
    assert [curve[iteration] for iteration in range(len(undisturbed))] == pytest.approx(undisturbed, rel=1e-9)
