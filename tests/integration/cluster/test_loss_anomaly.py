"""A loss that becomes nan, or spikes, on a whole cluster: the job goes back, and on without the batches that did it."""

import pytest
from whole_cluster import job_file

from unicron_lib.agent.fault_messages import InjectFault
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


PATIENCE = 40
MODEL = {"hidden_size": 32, "seq_length": 32, "num_attention_heads": 2, "lr_warmup_iters": 2}
GUARDED = {"loss_spike_patience_iters": PATIENCE, "save_interval": 10, "save_retain": 20, "pace_s": 0.2}


@pytest.fixture
def spiky(cluster, tmp_path):
    """One job of two ranks that has told its loss guard what is usual."""
    cluster.cli("up")  # brings lost nodes back
    for name in [name for name, job in cluster.state.jobs.items() if job.status is JobStatus.RUNNING]:
        cluster.cli("cancel", name)
    cluster.cli("submit", str(job_file(tmp_path, "spiky", max_gpus=2, throughput_flops={2: 5.0e8}, **MODEL, **GUARDED)))
    cluster.calm({"spiky": 2})
    cluster.wait("what is usual", lambda: cluster.iterations().get("spiky", -1) > 120)
    yield cluster
    if cluster.state.jobs["spiky"].status is JobStatus.RUNNING:
        cluster.cli("cancel", "spiky")


def iteration(cluster):
    """The newest one of the job, asked for without a command, which takes a second to start."""
    generation = cluster.state.jobs["spiky"].generation
    seen = cluster.ask(lambda client: client.progress())
    return max((it.iteration for it in seen if (it.job, it.generation) == ("spiky", generation)), default=-1)


def spike_told(cluster, generation):
    """What the guard has journalled about that generation of the job, in the order of times."""
    events = [entry.event for entry in cluster.journal.entries()]
    return [it for it in events if isinstance(it, LossSpiked) and (it.job, it.generation) == ("spiky", generation)]


def spike_at_once(cluster):
    """What `unicron inject spike spiky/1` does, without the seconds that a command takes to start."""
    slot = cluster.state.jobs["spiky"].assignment.slots[1]
    command = InjectFault(step="second-spike", fault="spike", job="spiky", rank=1, amount=1000)
    assert cluster.ask(lambda client: client.command(slot.node, command)).ok


@pytest.mark.storm
def test_a_spike_that_does_not_pass_is_undone_without_its_batches_and_the_next_one_there_ends_the_job(spiky):
    known, seq, generation = set(spiky.state.incidents), spiky.state.seq, spiky.state.jobs["spiky"].generation
    spiky.cli("inject", "spike", "spiky/1", "--amount", "1000")  # it would last long after the roll-back
    spiky.until("a plan", lambda state: state.jobs["spiky"].skipped)
    spiky.calm({"spiky": 2})
    incident, rewind = the_answer(spiky, known, seq, generation)
    trains_on_without(spiky, rewind)
    job = spiky.state.jobs["spiky"]
    assert spike_told(spiky, job.generation) == [], "the injected spike outlives the roll-back"
    assert iteration(spiky) < rewind.first + PATIENCE - 5, "too late for the same place"

    spike_at_once(spiky)
    state = spiky.until("its end", lambda state: state.jobs["spiky"].status is JobStatus.FAILED)
    (second, *_) = spike_told(spiky, job.generation)
    assert abs(second.iteration - rewind.first) <= PATIENCE
    reason = state.jobs["spiky"].reason
    assert "a second time at the same place" in reason
    assert f"although the batches {rewind.first}-{rewind.last} are left out there: it is not the data" in reason
    (shown,) = [row for row in spiky.json("jobs")["jobs"] if row["job"] == "spiky"]
    assert shown["reason"] == reason
    assert f"before iteration {rewind.first}" in " ".join(spiky.cli("explain", incident.id).stdout.split())
    spiky.check_journal()


def the_answer(cluster, known, seq, generation):
    """The incident of the first spike and how far back its plan goes, when all the journal says of it has been looked at."""
    events = [entry.event for entry in cluster.journal.entries() if entry.seq > seq]
    assert [it.target for it in events if isinstance(it, FaultInjected)] == ["spiky/1"]
    (told,) = spike_told(cluster, generation)
    (incident,) = [it for it in cluster.new_failures(known) if it.kind is ErrorKind.LOSS_ANOMALY]  # busy machines do stall
    assert (incident.jobs, incident.status) == (("spiky",), IncidentStatus.CLOSED)
    assert "does not pass" in incident.root.evidence
    (progress,) = [p for p in cluster.state.plans.values() if incident.id in p.plan.incidents]
    rewind = progress.plan.rewinds["spiky"]
    assert rewind.first == told.iteration
    (restored,) = (progress.results[it.id] for it in progress.plan.steps if it.kind is StepKind.RESTORE)
    assert 0 < restored["iteration"] < rewind.first
    return incident, rewind


def trains_on_without(cluster, rewind):
    """The job has passed the place, with the batches after the guilty ones in their stead."""
    job = cluster.state.jobs["spiky"]
    assert job.skipped == ((rewind.first, rewind.last),)
    cluster.wait("the iteration again", lambda: iteration(cluster) > rewind.first + 10)
    directory = ledger_directory(cluster.site.run_dir, "spiky")
    assert read_left_out(directory) == job.skipped
    order, lineage = sample_order(job.spec, open_corpus(job.spec)), read_lineage(directory)[0]
    assert lineage[rewind.first - 1].samples == order.samples(rewind.first - 1)
    assert lineage[rewind.first].samples == order.samples(rewind.last + 1)
