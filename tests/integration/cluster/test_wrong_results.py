"""`make storm`: a rank of a whole cluster computes wrongly without a word; its node goes, and nothing of what it did stays."""

import pytest
from whole_cluster import job_file

from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.training.ledger import check_ledger, ledger_directory

pytestmark = pytest.mark.storm
INTERVAL = 20


def test_the_node_that_computes_wrongly_is_isolated_and_its_job_computes_again(pair, tmp_path):
    keys = {
        "train_iters": 500,
        "weight": 99.0,
        "min_gpus": 4,
        "max_gpus": 4,
        "save_interval": 10,
        "throughput_flops": {4: 9.0e8},
    }
    pair.cli("submit", str(job_file(tmp_path, "voting", rerun_check_interval=INTERVAL, **keys)))
    pair.until("its ranks", lambda state: "voting" in state.jobs and state.jobs["voting"].gpus == 4)
    pair.wait("a check that was passed", lambda: pair.iterations().get("voting", 0) > INTERVAL)
    known, culprit = set(pair.state.incidents), pair.state.jobs["voting"].assignment.slots[1].node
    pair.cli("inject", "corrupt", "voting/1")
    pair.until("the verdict", lambda state: state.nodes[culprit].status is NodeStatus.QUARANTINED)
    state = pair.until("calm", lambda state: state.active_plan is None and not state.open_incidents)
    (incident,) = [it for it in pair.new_failures(known) if it.kind == ErrorKind.CUDA_ERROR]
    assert "rank 1 computes wrongly" in " ".join(pair.cli("explain", incident.id).stdout.split())
    (plan,) = [p for p in state.plans.values() if incident.id in p.plan.incidents]
    rewind = plan.plan.rewinds["voting"]
    assert (rewind.repeats, rewind.last - rewind.first + 1, rewind.first % INTERVAL) == (True, INTERVAL, 0)
    (restored,) = (plan.results[it.id] for it in plan.plan.steps if (it.kind, it.job) == (StepKind.RESTORE, "voting"))
    assert rewind.first - 11 < restored["iteration"] < rewind.first
    job = state.jobs["voting"]
    assert (job.skipped, culprit in job.nodes) == ((), False)
    pair.until("its end, over checks that are passed", lambda state: state.jobs["voting"].status is JobStatus.FINISHED)
    assert check_ledger(ledger_directory(pair.site.run_dir, "voting"), job.spec) == []
    assert pair.state.jobs["voting"].generation == job.generation
    pair.check_journal()
    pair.cli("nodes", "--release", culprit)
    pair.calm({"big": 4, "small": 2})
