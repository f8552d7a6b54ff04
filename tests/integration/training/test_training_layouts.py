"""The number of ranks changes nothing but the time: losses, samples and checkpoints stay the same."""

import pytest
from training_jobs import reference_losses, tiny

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankFinished
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return reference_losses(tiny(), tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(ranks, reference: list[float], world_size: int) -> None:
    spec = tiny()
    ranks.launch(spec, world_size)
    for rank in range(world_size):
        _, finished = ranks.agent.wait(RankFinished, generation=1, rank=rank)
        assert finished.iteration == 9
        assert ranks.exit_code("tiny", 1, rank) == 0
        progress = ranks.agent.all(Progress, generation=1, rank=rank)
        assert [p.iteration for p in progress] == list(range(10))
        assert [p.loss for p in progress] == pytest.approx(reference, rel=1e-12)
    assert check_ledger(ledger_directory(ranks.run_dir, "tiny"), spec) == []
    manifest, skipped = CheckpointRepository(open_store(ranks.store_url), "tiny").newest_complete()
    assert (manifest.iteration, manifest.consumed_samples, len(manifest.shards), skipped) == (9, 80, world_size, [])


def test_a_drained_job_goes_on_with_another_number_of_ranks(ranks, reference: list[float]) -> None:
    spec = tiny(pace_s=0.1)
    restore_from, last = None, -1
    for generation, world_size in enumerate((2, 3, 1), 1):
        ranks.launch(spec, world_size, generation=generation, restore_from=restore_from)
        ranks.agent.wait(Progress, generation=generation, rank=0, when=lambda p, last=last: p.iteration > last + 1)
        if generation == 3:
            break
        ranks.agent.order(generation, world_size - 1, "drain")
        drained = [ranks.agent.wait(RankDrained, generation=generation, rank=rank)[1] for rank in range(world_size)]
        assert len({(d.iteration, d.manifest) for d in drained}) == 1
        assert [ranks.exit_code("tiny", generation, rank) for rank in range(world_size)] == [0] * world_size
        restore_from, last = drained[0].manifest, drained[0].iteration
        assert restore_from is not None
    ranks.agent.wait(RankFinished, generation=3, rank=0)
    directory = ledger_directory(ranks.run_dir, "tiny")
    assert check_ledger(directory, spec) == []
    lineage, _ = read_lineage(directory)
    assert [entry.loss for entry in lineage.values()] == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize(("params_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_other_precisions_and_micro_batches_agree_within_their_own(
    ranks, reference: list[float], params_dtype: str, tolerance: float
) -> None:
    ranks.launch(tiny(params_dtype=params_dtype, micro_batch_size=2), 3)
    ranks.agent.wait(RankFinished, generation=1, rank=2)
    losses = [p.loss for p in ranks.agent.all(Progress, generation=1, rank=2)]
    assert losses == pytest.approx(reference, rel=tolerance)
