"""A loss that becomes nan on a whole cluster: the job goes back, and on without the batch that did it."""

from unicron_lib.domain.events import FaultInjected
from unicron_lib.domain.failures import ErrorKind
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
