"""Real ranks whose loss becomes nan, and go on from their checkpoint without the batch; and such whose loss spikes."""

from training_jobs import tiny

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import Progress, RankFailed, RankFinished
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.classify import classify
from unicron_lib.detection.loss_guard import LossGuard, Point, Recovered, RollBack, Spiking
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.skipping import leaving_out
from unicron_lib.training.data import open_corpus, sample_order
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage


def test_a_nan_costs_its_batch_and_nothing_else(ranks) -> None:
    spec = tiny(job="spoiled", train_iters=14, save_interval=2, pace_s=0.05)
    ranks.launch(spec, 2)
    ranks.agent.wait(Progress, generation=1, rank=0, when=lambda p: p.iteration >= 5)
    ranks.agent.order(1, 1, "nan")
    _, failed = ranks.agent.wait(RankFailed, generation=1, rank=1)
    assert failed.error_type == "FloatingPointError", "the fault did not happen"
    assert ranks.exit_code("spoiled", 1, 0) == ranks.exit_code("spoiled", 1, 1) == 1
    failure = classify(Observation(node="n", boot="b", seq=0, at=1.0, body=failed))
    assert failure.kind is ErrorKind.LOSS_ANOMALY
    first, last = failure.spoiled
    skipped = leaving_out((), first=first, last=last)
    ranks.extra["UNICRON_SKIPPED_BATCHES"] = str([list(part) for part in skipped])
    repository = CheckpointRepository(open_store(ranks.store_url), "spoiled")
    repository.fence(2, up_to=first - 1)
    manifest, _ = repository.newest_complete()
    assert 0 < manifest.iteration < first
    ranks.launch(spec, 2, generation=2, restore_from=manifest.key)
    ranks.agent.wait(RankFinished, generation=2, rank=1)
    directory = ledger_directory(ranks.run_dir, "spoiled")
    assert check_ledger(directory, spec, skipped) == []
    lineage, _ = read_lineage(directory)
    canonical = sample_order(spec, open_corpus(spec))
    assert lineage[first - 1].samples == canonical.samples(first - 1)
    assert lineage[first].samples == canonical.samples(first + 1), "the batch of the nan is left out"
    assert all(p.grad_norm > 0 for p in ranks.agent.all(Progress, generation=2, rank=0))


def test_an_injected_spike_is_told_by_the_loss_guard_and_passes_by_itself(ranks) -> None:
    """The gradient is wrong for some iterations, for all ranks alike; then the job learns again, as after a real spike."""
    spec = tiny(job="spiked", train_iters=260, save_interval=500)
    ranks.launch(spec, 2)
    ranks.agent.wait(Progress, generation=1, rank=0, when=lambda p: p.iteration >= 120)
    ranks.agent.order(1, 1, "spike", amount=20)
    ranks.agent.wait(RankFinished, generation=1, rank=0)
    curve = [
        Point(iteration=p.iteration, loss=p.loss, grad_norm=p.grad_norm)
        for p in ranks.agent.all(Progress, generation=1, rank=0)
    ]
    usual = curve[115].loss
    assert max(point.loss for point in curve[120:]) > 2 * usual, "the fault did not happen"
    spiking, recovered = LossGuard(patience_iters=130).look(1, curve)
    assert isinstance(spiking, Spiking)
    assert isinstance(recovered, Recovered)
    assert abs(curve[-1].loss - usual) < 0.2 * usual
    _, rolled_back = LossGuard(patience_iters=22).look(1, curve)
    assert isinstance(rolled_back, RollBack), "whose patience is shorter does not wait for that"
    assert ranks.agent.all(Progress, generation=1, rank=1)[-1].loss == curve[-1].loss, "the replicas stay equal"
