"""The training that Unicron is measured against, under the real torchrun."""

import asyncio

import pytest
from training_jobs import reference_losses, tiny

from unicron_lib.local.iterations import IterationWatch
from unicron_lib.local.processes import marked
from unicron_lib.local.torchrun import Torchrun
from unicron_lib.training.ledger import check_ledger, read_lineage

DEADLINE_S = 120.0


@pytest.mark.storm
async def test_a_killed_rank_under_torchrun_costs_the_iterations_since_the_checkpoint_and_no_loss(tmp_path) -> None:
    spec = tiny(train_iters=16, pace_s=0.1)
    run = Torchrun(spec, tmp_path / "run", ranks=2, nodes=1)
    with IterationWatch(run.ledgers) as watch:
        try:
            run.start_node()
            await seen(watch, lambda found: any(it.iteration >= 9 for it in found))
            run.process(1).kill()
            await seen(watch, lambda found: len([it for it in found if it.iteration == 15]) == 2)
        finally:
            await run.stop()
    again = [it.iteration for it in watch.sights if it.generation == 2 and it.rank == 0]
    first = (max(it.iteration for it in watch.sights if it.generation == 1) + 1) // 4 * 4
    assert again == list(range(first, 16))
    lineage, _ = read_lineage(run.ledgers)
    assert [entry.loss for _, entry in sorted(lineage.items())] == pytest.approx(reference_losses(spec, tmp_path), rel=1e-12)
    assert check_ledger(run.ledgers, spec) == []
    assert marked(run.mark) == []


async def seen(watch, holds) -> None:
    assert await asyncio.to_thread(watch.until, holds, timeout_s=DEADLINE_S)
