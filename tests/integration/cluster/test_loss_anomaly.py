"""A loss that becomes nan, or spikes, on a whole cluster: the job goes back, and on without the batches that did it."""

import pytest
from whole_cluster import job_file

from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.events import FaultInjected, LossSpiked
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.training.data import open_corpus, sample_order
from unicron_lib.training.ledger import ledger_directory, read_left_out, read_lineage


def test_a_nan_takes_its_job_back_and_costs_one_batch(pair):
    known, seq = set(pair.state.incidents), pair.state.seq
    other = pair.state.jobs["small"].generation
    pair.cli("inject", "nan", "big/1")
    pair.until("an answer", lambda state: any(state.incidents[name].closed_at for name in set(state.incidents) - known))
    assert [e for e in pair.journal.entries() if e.seq > seq and isinstance(e.event, FaultInjected)]
    state = pair.calm({"big": 4, "small": 2})
    (incident,) = pair.new_failures(known)
    assert (incident.kind, incident.jobs) == (ErrorKind.LOSS_ANOMALY, ("big",))
    job, (plan,) = state.jobs["big"], [p for p in state.plans.values() if incident.id in p.plan.incidents]
    ((bad, _),) = job.skipped[-1:]
    first = plan.plan.rewinds["big"].first
    (restored,) = (plan.results[step.id] for step in plan.plan.steps if step.kind is StepKind.RESTORE and step.job == "big")
    assert restored["iteration"] < first
    assert f"before iteration {first}" in " ".join(pair.cli("explain", incident.id).stdout.split())
    assert str(bad) in pair.json("jobs")["jobs"][0]["batches_left_out"]
    pair.wait("the iteration again", lambda: pair.iterations()["big"] > first + 1)
    directory = ledger_directory(pair.site.run_dir, "big")
    assert read_left_out(directory) == job.skipped
    order = sample_order(job.spec, open_corpus(job.spec))
    assert read_lineage(directory)[0][first].samples == order.samples(bad + 1)
    assert state.jobs["small"].generation == other
    pair.check_journal()


@pytest.mark.storm
def test_a_spike_that_does_not_pass_is_told_then_undone_and_its_batches_are_left_out(cluster, tmp_path):
    cluster.cli("up")  # brings lost nodes back
    running = {name for name, job in cluster.state.jobs.items() if job.status is JobStatus.RUNNING}
    for name in running:
        cluster.cli("cancel", name)
    model = {"hidden_size": 32, "seq_length": 32, "num_attention_heads": 2, "lr_warmup_iters": 2}
    guarded = {"loss_spike_patience_iters": 15, "save_interval": 10, "save_retain": 20, "pace_s": 0.05}
    cluster.cli("submit", str(job_file(tmp_path, "spiky", max_gpus=2, throughput_flops={2: 5.0e8}, **model, **guarded)))
    cluster.calm({"spiky": 2})
    cluster.wait("what is usual", lambda: cluster.iterations().get("spiky", -1) > 120)
    known, seq = set(cluster.state.incidents), cluster.state.seq
    cluster.cli("inject", "spike", "spiky/1", "--amount", "15")  # over by then
    cluster.until("an answer", lambda state: any(state.incidents[name].closed_at for name in set(state.incidents) - known))
    state = cluster.calm({"spiky": 2})
    events = [entry.event for entry in cluster.journal.entries() if entry.seq > seq]
    assert [it.target for it in events if isinstance(it, FaultInjected)] == ["spiky/1"]
    (told,) = [it for it in events if isinstance(it, LossSpiked)]
    (incident,) = [it for it in cluster.new_failures(known) if it.kind is ErrorKind.LOSS_ANOMALY]  # busy machines do stall
    assert (incident.jobs, incident.status) == (("spiky",), IncidentStatus.CLOSED)
    assert "does not pass" in incident.root.evidence
    (progress,) = [p for p in state.plans.values() if incident.id in p.plan.incidents]
    rewind = progress.plan.rewinds["spiky"]
    assert rewind.first == told.iteration
    (restored,) = (progress.results[it.id] for it in progress.plan.steps if it.kind is StepKind.RESTORE)
    assert 0 < restored["iteration"] < rewind.first
    job = state.jobs["spiky"]
    assert job.skipped == ((rewind.first, rewind.last),)
    assert f"before iteration {rewind.first}" in " ".join(cluster.cli("explain", incident.id).stdout.split())
    cluster.wait("the iteration again", lambda: cluster.iterations()["spiky"] > rewind.first + 1)
    directory = ledger_directory(cluster.site.run_dir, "spiky")
    assert read_left_out(directory) == job.skipped
    order = sample_order(job.spec, open_corpus(job.spec))
    assert read_lineage(directory)[0][rewind.first].samples == order.samples(rewind.last + 1)
    cluster.cli("cancel", "spiky")
    cluster.check_journal()
