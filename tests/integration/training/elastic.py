"""What the tests of elastic ranks have in common."""

import pytest
from training_jobs import tiny

from unicron_lib.agent.rank_messages import Progress, RankFinished, RankParked
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage

TRAIN_ITERS = 12


def job(name: str, **changes):
    return tiny(**{"job": name, "train_iters": TRAIN_ITERS, "pace_s": 0.1, "save_interval": 100} | changes)


def reached(ranks, iteration: int, *, generation: int = 1, rank: int = 0) -> None:
    ranks.agent.wait(Progress, generation=generation, rank=rank, when=lambda p: p.iteration >= iteration)


def held(ranks, order: str, *, generation: int, of) -> dict[int, RankParked]:
    """Order ranks to park, and hear that they have."""
    for rank in of:
        ranks.agent.order(generation, rank, order)
    return {rank: ranks.agent.wait(RankParked, generation=generation, rank=rank)[1] for rank in of}


def first(ranks, *, generation: int, world_size: int) -> list[Progress]:
    """The first progress of all ranks of a generation."""
    return [ranks.agent.wait(Progress, generation=generation, rank=rank)[1] for rank in range(world_size)]


def assert_undisturbed(ranks, spec, reference: list[float], *, generation: int, world_size: int) -> None:
    """The job finishes with the losses and the samples of a run without any failure."""
    for rank in range(world_size):
        ranks.agent.wait(RankFinished, generation=generation, rank=rank)
        assert ranks.exit_code(spec.job, generation, rank) == 0
    directory = ledger_directory(ranks.run_dir, spec.job)
    assert check_ledger(directory, spec) == []
    assert [entry.loss for entry in read_lineage(directory)[0].values()] == pytest.approx(reference, rel=1e-12)
