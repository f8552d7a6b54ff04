"""Which samples an iteration consumes: an order that depends on the seed only, never on the number of ranks."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.skipping import Ranges, batch_of
from unicron_lib.errors import UserError

BUILTIN = "builtin:"
FEWEST_SAMPLES = 512
"""A short text is cut into windows that overlap, so that it gives about that many samples."""


class Corpus:
    """A text as byte-level tokens, cut into samples of `seq_length` inputs and the same number of targets."""

    def __init__(self, data: bytes, *, seq_length: int) -> None:
        self._data = data
        self._length = seq_length + 1
        self._stride = max(1, min(seq_length, (len(data) - self._length) // FEWEST_SAMPLES))

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return (len(self._data) - self._length) // self._stride + 1

    def sample(self, index: int) -> bytes:
        """The `seq_length + 1` tokens of a sample."""
        start = index * self._stride
        return self._data[start : start + self._length]


class SampleOrder:
    """The canonical order: position -> sample, endless, each epoch in an order of its own.

    Batch b is at the positions [b * global_batch_size, (b + 1) * global_batch_size). Iteration i consumes batch i, or a later
    one if `skipped` batches are left out before it.
    """

    def __init__(self, *, num_samples: int, seed: int, global_batch_size: int, skipped: Ranges = ()) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._skipped = skipped

    def samples(self, iteration: int) -> list[int]:
        """The samples of an iteration, in order."""
        first = batch_of(iteration, self._skipped) * self._global_batch_size
        return [self._at(position) for position in range(first, first + self._global_batch_size)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self._num_samples)
        return permutation(self._num_samples, self._seed, epoch)[place]


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch: samples sorted by a keyed hash, the same for ever on every machine and version."""
    key = f"{seed}/{epoch}".encode()

    def place(sample: int) -> bytes:
        return hashlib.blake2b(sample.to_bytes(8, "big"), key=key[:64], digest_size=16).digest()

    return sorted(range(num_samples), key=place)


def share(num_micro_batches: int, *, rank: int, world_size: int) -> range:
    """The micro-batches of an iteration that a rank takes: contiguous, none twice, sizes differ by one at most."""
    return range(rank * num_micro_batches // world_size, (rank + 1) * num_micro_batches // world_size)


def open_corpus(spec: JobSpec) -> Corpus:
    """The text that the job names; raises UserError when there is none, or one that does not fit the model."""
    data = _read(spec)
    if len(data) < spec.seq_length + 2:
        raise UserError(f"job {spec.job!r}: {spec.data_path} has {len(data)} bytes, too few for seq_length {spec.seq_length}")
    if spec.vocab_size < 256 and max(data) >= spec.vocab_size:
        raise UserError(
            f"job {spec.job!r}: {spec.data_path} has the byte {max(data)}, vocab_size {spec.vocab_size} ends below it"
        )
    return Corpus(data, seq_length=spec.seq_length)


def sample_order(spec: JobSpec, corpus: Corpus, skipped: Ranges = ()) -> SampleOrder:
    """The order in which the job consumes its corpus, without the `skipped` batches."""
    size = spec.global_batch_size
    return SampleOrder(num_samples=corpus.num_samples, seed=spec.seed, global_batch_size=size, skipped=skipped)


def _read(spec: JobSpec) -> bytes:
    if spec.data_path.startswith(BUILTIN):
        name = spec.data_path.removeprefix(BUILTIN)
        texts = sorted(p.name.removesuffix(".txt") for p in (files("unicron_lib.training") / "corpus").iterdir())
        if name not in texts:
            raise UserError(
                f"job {spec.job!r}: there is no {spec.data_path}, only {', '.join(BUILTIN + text for text in texts)}"
            )
        return (files("unicron_lib.training") / "corpus" / f"{name}.txt").read_bytes()
    try:
        return Path(spec.data_path).read_bytes()
    except OSError as error:
        raise UserError(f"job {spec.job!r}: data_path {spec.data_path!r} cannot be read: {error.strerror}") from error
