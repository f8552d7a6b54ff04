"""Each sample is consumed once and in canonical order, whatever the numbers of ranks and however often they change."""

from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.training.data import Corpus, SampleOrder, permutation, share


@given(num_samples=st.integers(1, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_an_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(num_samples, seed, epoch)) == list(range(num_samples))


def test_the_order_never_changes() -> None:
    """Checkpoints are resumed by later versions: this list is part of the format."""
    assert permutation(10, 1234, 0) == [6, 0, 1, 4, 3, 2, 8, 9, 5, 7]


@given(num_micro_batches=st.integers(1, 64), data=st.data())
def test_ranks_share_micro_batches_evenly(num_micro_batches: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, num_micro_batches))
    shares = [share(num_micro_batches, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [m for part in shares for m in part] == list(range(num_micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    num_samples=st.integers(1, 100),
    micro_batch_size=st.integers(1, 4),
    num_micro_batches=st.integers(1, 12),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_resizes_change_nothing(
    num_samples: int, micro_batch_size: int, num_micro_batches: int, seed: int, data: st.DataObject
) -> None:
    """At each iteration another number of ranks, sometimes going back to an earlier iteration as after a failure."""
    batch = micro_batch_size * num_micro_batches
    consumed: dict[int, list[int]] = {}
    iteration = 0
    for _ in range(data.draw(st.integers(1, 12))):
        world_size = data.draw(st.integers(1, num_micro_batches))
        order = SampleOrder(num_samples=num_samples, seed=seed, global_batch_size=batch)
        samples = order.samples(iteration)
        taken = [share(num_micro_batches, rank=rank, world_size=world_size) for rank in range(world_size)]
        consumed[iteration] = [s for part in taken for m in part for s in samples[m * micro_batch_size :][:micro_batch_size]]
        iteration = data.draw(st.integers(0, iteration)) if data.draw(st.booleans()) else iteration + 1
    flat = [sample for i in range(max(consumed) + 1) for sample in consumed[i]]
    canonical = [permutation(num_samples, seed, p // num_samples)[p % num_samples] for p in range(len(flat))]
    assert flat == canonical
    for epoch in range(len(flat) // num_samples):
        assert len(set(flat[epoch * num_samples :][:num_samples])) == num_samples


@given(length=st.integers(0, 3000), seq_length=st.integers(1, 64))
def test_samples_lie_within_the_text(length: int, seq_length: int) -> None:
    text = bytes(i % 251 for i in range(length + seq_length + 1))
    corpus = Corpus(text, seq_length=seq_length)
    assert all(len(corpus.sample(index)) == seq_length + 1 for index in range(corpus.num_samples))
    assert corpus.sample(0) == text[: seq_length + 1]
