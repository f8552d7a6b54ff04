"""Ranks on GPUs: NCCL's communicators are aborted, and made anew in the processes that live on."""

import signal
import threading

import pytest
import torch
from elastic import first, held, job, reached

from unicron_lib.agent.rank_messages import Progress, RankFinished
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def expected(ranks) -> list[float]:
    """The losses of a rank that nothing happens to."""
    ranks.launch(job("calm"), 1)
    ranks.agent.wait(RankFinished, generation=1, rank=0)
    return [progress.loss for progress in ranks.agent.all(Progress, generation=1, rank=0)]


@pytest.mark.parametrize("gone", ["nobody", "killed", "stopped"])
def test_an_abort_ends_what_waits_for_nccl_and_survivors_form_new_communicators(ranks, expected, gone: str) -> None:
    size = 1 if gone == "nobody" else 3
    if torch.cuda.device_count() < size:
        pytest.skip(f"there are fewer than {size} CUDA devices")
    spec, survivors = job("aborted"), range(max(1, size - 1))
    ranks.launch(spec, size, generation=2)
    reached(ranks, 2, generation=2)
    if gone == "killed":
        ranks.signal("aborted", 2, 2, signal.SIGKILL)
    elif gone == "stopped":
        ranks.stop("aborted", 2, 2)
    threading.Event().wait(2 * spec.pace_s)  # until the others are in the all-reduce
    parked = held(ranks, "abort", generation=2, of=survivors)
    ranks.launch(spec, len(survivors), generation=3, kept={rank: (2, rank) for rank in survivors})
    began = first(ranks, generation=3, world_size=len(survivors))
    assert {p.iteration for p in began} == {max(p.iteration for p in parked.values()) + 1}
    assert {p.source for p in began} <= {"own memory", *(f"rank {rank}" for rank in survivors)}
    for rank in survivors:
        ranks.agent.wait(RankFinished, generation=3, rank=rank)
    directory = ledger_directory(ranks.run_dir, spec.job)
    assert check_ledger(directory, spec) == []
    assert [entry.loss for entry in read_lineage(directory)[0].values()] == pytest.approx(expected, rel=1e-9)
