"""Real ranks that compare what they compute: one that computes wrongly is found, and a sound job is not changed by it."""

import torch
from elastic import assert_undisturbed, job, reached

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import Progress, RankFailed, RankFinished
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind, Severity
from unicron_lib.training.shards import read_state

INTERVAL = 3


def end_state(ranks, name: str) -> dict[str, torch.Tensor]:
    repository = CheckpointRepository(open_store(ranks.store_url), name)
    manifest, _ = repository.newest_complete()
    assert manifest.iteration == 11
    return read_state(repository, manifest)


def run_through(ranks, spec, *, generation: int, world_size: int) -> dict[str, torch.Tensor]:
    ranks.launch(spec, world_size, generation=generation)
    for rank in range(world_size):
        ranks.agent.wait(RankFinished, generation=generation, rank=rank)
    return end_state(ranks, spec.job)


def failure_of(told: RankFailed):
    return classify(Observation(node="n", boot="b", seq=0, at=1.0, body=told))


def test_a_rank_that_computes_wrongly_is_found_and_leaves_no_trace(ranks, undisturbed: list[float]) -> None:
    spec = job("corrupt", rerun_check_interval=INTERVAL, save_interval=2, pace_s=0.25)
    ranks.launch(spec, 3)
    reached(ranks, 5)
    ranks.agent.order(1, 2, "corrupt")
    _, told = ranks.agent.wait(RankFailed, generation=1, rank=2)
    assert (told.error_type, told.verdict, told.parked) == ("WrongResult", "exclude", False)
    assert ranks.exit_code("corrupt", 1, 2) == 1
    first, last = told.spoiled
    assert (last + 1 - first, last % INTERVAL) == (INTERVAL, INTERVAL - 1)
    others = [ranks.agent.wait(RankFailed, generation=1, rank=rank)[1] for rank in (0, 1)]
    assert {(it.error_type, it.spoiled, it.verdict, it.parked) for it in others} == {
        ("PeerComputesWrongly", told.spoiled, "", True)
    }
    assert all("rank 2 computes wrongly" in it.message for it in others)
    failure = failure_of(told)
    assert (failure.kind, failure.severity, failure.is_echo) == (ErrorKind.CUDA_ERROR, Severity.SEV1, False)
    assert (failure.iteration, failure.spoiled) == (first - 1, told.spoiled)
    assert all(failure_of(it).is_echo and failure_of(it).spoiled == told.spoiled for it in others)
    losses = zip((p.loss for p in ranks.agent.all(Progress, generation=1, rank=0)), undisturbed, strict=False)
    assert all(abs(loss - right) < 0.01 * right for loss, right in losses), "nobody else would see it"
    repository = CheckpointRepository(open_store(ranks.store_url), "corrupt")
    repository.fence(2, up_to=first - 1)
    manifest, _ = repository.newest_complete()
    assert 0 < manifest.iteration < first
    for rank in (0, 1):
        ranks.agent.order(1, rank, "quit")
    ranks.launch(spec, 2, generation=2, restore_from=manifest.key)
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=2)
    assert ranks.agent.all(RankFailed, generation=2, rank=0) == []
    healed = end_state(ranks, "corrupt")
    for name, tensor in run_through(ranks, job("sound", pace_s=0.0), generation=3, world_size=2).items():
        torch.testing.assert_close(healed[name], tensor, rtol=0, atol=1e-12)


def test_a_sound_job_ends_bit_by_bit_as_without_the_check(ranks) -> None:
    unchecked = run_through(ranks, job("plain", pace_s=0.0, hidden_dropout=0.1), generation=1, world_size=3)
    checked = job("checked", pace_s=0.0, hidden_dropout=0.1, rerun_check_interval=2)
    for name, tensor in run_through(ranks, checked, generation=2, world_size=3).items():
        assert torch.equal(unchecked[name], tensor), name
    assert "differ" not in ranks.logs()
