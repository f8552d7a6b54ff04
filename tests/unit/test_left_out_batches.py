"""Batches that are left out: the order of the others, what the ledger proves, and which checkpoints still count."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.loss_guard import Point
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.data import SampleOrder, open_corpus, permutation, sample_order
from unicron_lib.training.doubt import Doubt
from unicron_lib.training.ledger import Entry, Ledger, check_ledger, read_left_out
from unicron_lib.training.saver import reach_of

SPEC = JobSpec(job="a", train_iters=8, global_batch_size=4)
CORPUS = open_corpus(SPEC)
SKIPPED = ((3, 4),)


@given(
    num_samples=st.integers(1, 50),
    batch=st.integers(1, 6),
    spans=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_all_other_samples_are_consumed_once_in_canonical_order(num_samples, batch, spans):
    skipped, start = [], 0
    for gap, more in spans:
        skipped.append((start + gap, start + gap + more))
        start += gap + more + 1
    order = SampleOrder(num_samples=num_samples, seed=7, global_batch_size=batch, skipped=tuple(skipped))
    consumed = [sample for iteration in range(20) for sample in order.samples(iteration)]
    gone = {number for first, last in skipped for number in range(first, last + 1)}
    kept = [number for number in range(20 + len(gone)) if number not in gone][:20]
    places = [number * batch + offset for number in kept for offset in range(batch)]
    assert consumed == [permutation(num_samples, 7, place // num_samples)[place % num_samples] for place in places]


def record(directory, iterations, *, generation, skipped=(), told=None):
    order = sample_order(SPEC, CORPUS, skipped)
    with Ledger(directory, generation=generation, rank=0, skipped=skipped if told is None else told) as ledger:
        for iteration in iterations:
            ledger.write(Entry(iteration=iteration, samples=order.samples(iteration), loss=1.0))


def test_a_ledger_proves_that_nothing_but_the_skipped_batches_is_missing(tmp_path):
    record(tmp_path, range(6), generation=1)
    record(tmp_path, range(2, 8), generation=2, skipped=SKIPPED)
    assert read_left_out(tmp_path) == SKIPPED
    assert check_ledger(tmp_path, SPEC, SKIPPED) == []
    assert check_ledger(tmp_path, SPEC)[0] == "the batches 3-4 were left out, to be left out were none"


def test_a_ledger_that_skipped_too_little_or_in_silence_is_found(tmp_path):
    record(tmp_path, range(8), generation=1)
    assert check_ledger(tmp_path, SPEC, SKIPPED)[0] == "the batches none were left out, to be left out were 3-4"
    record(tmp_path, range(8), generation=2, skipped=SKIPPED, told=())
    assert len(check_ledger(tmp_path, SPEC)) == 5, "iterations 3 to 7 consumed other batches"


@pytest.fixture
def repository(tmp_path: Path) -> CheckpointRepository:
    return CheckpointRepository(FileStore(tmp_path), "a")


def save(repository: CheckpointRepository, iteration: int, *, generation: int = 1) -> None:
    key = {"iteration": iteration, "generation": generation}
    shard = repository.put_shard(**key, save="all", rank=0, data=b"state", tensors=("param.0",))
    manifest = Manifest(job="a", **key, loss=1.0, consumed_samples=8, layout=Layout(dp=1), shards=(shard,))
    repository.commit(manifest)


def test_checkpoints_from_after_the_harm_count_no_more_for_anybody(repository):
    for iteration in (9, 19, 29):
        save(repository, iteration)
    repository.fence(2, up_to=20)
    repository.fence(2, up_to=20)
    assert repository.iterations() == [19, 9]
    save(repository, 24, generation=2)
    repository.fence(3)
    assert repository.iterations() == [24, 19, 9], "what was fenced off once stays so, what came later counts"


@pytest.mark.parametrize(
    ("keys", "reach"),
    [
        ({"loss_guard": False}, None),
        ({"loss_spike_patience_iters": 50}, 0),
        ({"loss_guard": False, "rerun_check_interval": 30}, 70),
        ({"loss_spike_patience_iters": 10, "rerun_check_interval": 30}, 70),
    ],
)
def test_how_old_the_oldest_checkpoint_must_be(keys, reach):
    assert reach_of(JobSpec(job="a", **keys), 100) == reach


def test_what_is_from_before_a_spike_stays_until_that_is_decided():
    keys = {"loss_spike_patience_iters": 10}
    assert reach_of(JobSpec(job="a", **keys), 100, doubted_from=95) == 80
    assert reach_of(JobSpec(job="a", **keys), 200, doubted_from=95) == 94
    assert reach_of(JobSpec(job="a", loss_guard=False), 200, doubted_from=95) == 94


def doubt_over(doubt: Doubt, losses: Iterable[float], *, first: int, generation: int = 1) -> list[int | None]:
    """Since when the loss is doubted, after each iteration from `first` on."""
    since = []
    for iteration, loss in enumerate(losses, first):
        doubt.look(generation, Point(iteration=iteration, loss=loss, grad_norm=loss))
        since.append(doubt.since)
    return since


def test_a_rank_doubts_a_spike_until_it_passes_or_is_gone_back_from():
    doubt = Doubt(patience_iters=10)
    assert set(doubt_over(doubt, [2.0] * 50, first=0)) == {None}
    assert doubt_over(doubt, [9.0] * 60, first=50)[3:] == [50] * 57, "longer than the patience: nobody has decided"
    assert set(doubt_over(doubt, [9.0] * 5, first=110, generation=2)) == {50}, "others have failed meanwhile"
    assert set(doubt_over(doubt, [2.0] * 30, first=45, generation=3)) == {None}, "gone back"
    assert doubt_over(doubt, [9.0] * 5, first=75, generation=3)[3:] == [75] * 2
    assert doubt_over(doubt, [2.0] * 8, first=80, generation=3)[5:] == [None] * 3, "it has passed"


def test_without_a_guard_nothing_is_doubted():
    assert set(doubt_over(Doubt(), [2.0] * 50 + [9.0] * 30, first=0)) == {None}


def test_checkpoints_are_kept_until_one_is_old_enough(repository):
    for iteration in range(9, 100, 10):
        save(repository, iteration)
        repository.collect(retain=2, generation=1, reach=iteration - 40)
    assert repository.iterations() == [99, 89, 79, 69, 59]
    newest, skipped = repository.newest_complete()
    assert (newest.iteration, skipped) == (99, [])
    repository.collect(retain=2, generation=1)
    assert repository.iterations() == [99, 89]
