"""A whole copy of a job's training state: parameters, moments, and the flat buffer that gradients are summed in."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.training import megatron
from unicron_lib.training.optimizer import AdamW, clip, learning_rate

BUCKET_BYTES = 25 << 20
FEWEST_BUCKETS = 4
"""Small models have several buckets, too: they are what large ones are tried out with."""
SPIKE_FACTOR = 1000.0
ID_BASE = 1 << 20
"""Sample numbers travel in two digits to this base: float32 holds each exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What the ranks of an iteration told each other along with the gradient; `loss` is the mean over the global batch.

    `grad_norm` is the L2 norm of the whole gradient before clipping, known after the step. `generation` is the one in which
    they told it, `is_resumed` tells that the iteration was begun in an earlier one.
    """

    loss: float
    stop: bool
    save: bool
    samples: list[int]
    grad_norm: float = 0.0
    generation: int = -1
    is_resumed: bool = False


class Replica:
    """The model with its optimizer, all ranks' equal after every iteration.

    All parameters are views of one flat buffer, in an order that puts those with weight decay first. Gradients are
    summed over micro-batches in a second one of float32 (float64 for a float64 model), scaled by the number of
    micro-batches of the whole job: any split of them among ranks gives the same sum. The buffer's tail carries the
    loss, two flags and the samples to the other ranks, as a part of the last bucket.

    `buckets` are the parts of the buffer that are summed over the ranks one after another, by number: the same in every layout.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        self._spec = spec
        self.device = device
        self._model = megatron.build_model(spec, device)
        named = sorted(self._model.named_parameters(), key=lambda item: item[1].dim() < 2)
        self._parameters = dict(named)
        num_decayed = sum(p.numel() for p in self._parameters.values() if p.dim() >= 2)
        size = sum(p.numel() for p in self._parameters.values())
        dtype = torch.float64 if spec.params_dtype == "float64" else torch.float32
        self._main = torch.cat([p.detach().reshape(-1).to(dtype) for p in self._parameters.values()])
        self._adam = AdamW(self._main, num_decayed=num_decayed, weight_decay=spec.weight_decay)
        self.buffer = torch.zeros(size + 3 + 3 * spec.global_batch_size, dtype=dtype, device=device)
        self._gradient, self._tail = self.buffer[:size], self.buffer[size:]
        self.buckets = _buckets(self.buffer, size)
        self.spare = torch.empty(max(map(len, self.buckets)), dtype=dtype, device=device)
        self._model_gradient = torch.zeros(size, dtype=megatron.DTYPES[spec.params_dtype], device=device)
        self._is_mixed = self._model_gradient.dtype != dtype
        self._is_corrupt = False
        self._tie()

    def _tie(self) -> None:
        """Make gradients, and parameters where the dtype is the main one's, views of the flat buffers."""
        gradients = self._model_gradient if self._is_mixed else self._gradient
        for parameter, main, gradient in zip(
            self._parameters.values(), self._split(self._main), self._split(gradients), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
            if not self._is_mixed:
                parameter.data = main.view_as(parameter)

    def _split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(flat, [parameter.numel() for parameter in self._parameters.values()])

    @property
    def last_bucket(self) -> int:
        """The number of the bucket that carries the loss, the flags and the samples."""
        return len(self.buckets) - 1

    # --- one iteration ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Clear the gradient and what travels with it."""
        self.buffer.zero_()

    def clear_buckets(self, *, but: Collection[int]) -> None:
        """Clear all buckets but these."""
        for number, bucket in enumerate(self.buckets):
            if number not in but:
                bucket.zero_()

    @contextmanager
    def sparing(self, buckets: Collection[int]) -> Iterator[None]:
        """While the block adds micro-batches, these buckets keep what they hold: they have everybody's already."""
        held = {number: self.buckets[number].clone() for number in buckets}
        try:
            yield
        finally:
            for number, content in held.items():
                self.buckets[number].copy_(content)

    def add_micro_batch(self, samples: Sequence[int], tokens: torch.Tensor, *, iteration: int, first: int) -> None:
        """Add the gradient and loss of a micro-batch; its samples are the `first` and following ones of the iteration.

        What is random in it, dropout, depends on the job's seed and its place only, not on who computes it, nor how often.
        """
        with megatron.dropout_of(self._spec, self.device, f"{iteration}/{first}"):
            loss = megatron.loss_of(self._model, tokens) / self._spec.num_micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        if self._is_mixed:
            self._gradient.add_(self._model_gradient)
            self._model_gradient.zero_()
        if self._is_corrupt:
            self._flip_a_bit()
        self._tail[0] += loss.detach()
        marks = [(1, *divmod(sample, ID_BASE)) for sample in samples]
        rows = self._tail[3:].view(-1, 3)
        rows[first : first + len(samples)] += torch.tensor(marks, dtype=self._tail.dtype, device=self.device)

    def flag(self, *, stop: bool, save: bool, spoil: bool) -> None:
        """Tell the others: stop after this iteration, save after it; `spoil` is an injected fault, a loss of nan."""
        self._tail[1], self._tail[2] = float(stop), float(save)
        if spoil:
            self.buffer[: len(self._gradient) + 1] = float("nan")

    def turn_around(self) -> None:
        """An injected fault: the gradient points to where the loss is high, and outweighs those of all other ranks."""
        self._gradient.mul_(-SPIKE_FACTOR)

    def corrupt(self) -> None:
        """An injected fault: from now on this rank computes wrongly, if only a bit of each micro-batch's gradient."""
        self._is_corrupt = True

    def _flip_a_bit(self) -> None:
        """The highest one of the mantissa: the number stays what it was to within its half."""
        number = self._gradient[:1]
        integer, bit = (torch.int64, 51) if number.dtype == torch.float64 else (torch.int32, 22)
        number.view(integer).bitwise_xor_(1 << bit)

    def reduced(self) -> Reduced:
        """Read what came with the all-reduce of `buffer`; a sample that several ranks have added is listed as often."""
        tail = self._tail.tolist()
        rows = zip(*(iter(tail[3:]),) * 3, strict=True)
        samples = [int(high) * ID_BASE + int(low) if count == 1 else -int(count) for count, high, low in rows]
        return Reduced(loss=tail[0], stop=tail[1] > 0, save=tail[2] > 0, samples=samples)

    def step(self, iteration: int) -> float:
        """Apply the summed gradient; returns its norm. Raises FloatingPointError before anything is changed."""
        norm = float(self._gradient.norm())
        loss = float(self._tail[0])
        if norm - norm != 0.0 or loss - loss != 0.0:
            raise FloatingPointError(
                f"iteration {iteration}: the loss is {loss} and the gradient's norm {norm}; nothing was applied"
            )
        clip(self._gradient, norm=norm, clip_grad=self._spec.clip_grad)
        self._adam.step(self._gradient, lr=learning_rate(self._spec, iteration), iteration=iteration)
        if self._is_mixed:
            self._copy_to_model()
        return norm

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for parameter, main in zip(self._parameters.values(), self._split(self._main), strict=True):
            parameter.copy_(main.view_as(parameter))

    # --- state ------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Go back to the initial state, that of a new replica."""
        megatron.initialize(self._model, self._spec)
        with torch.no_grad():
            for parameter, main in zip(self._parameters.values(), self._split(self._main), strict=True):
                main.copy_(parameter.detach().reshape(-1))
        self._adam.exp_avg.zero_()
        self._adam.exp_avg_sq.zero_()

    @contextmanager
    def filling(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The whole state as flat buffers, in the same order on every rank: for who reads it, or fills it in the block."""
        yield self._main, self._adam.exp_avg, self._adam.exp_avg_sq
        if self._is_mixed:
            self._copy_to_model()

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of the training state by name, as views: valid until the next step."""
        flats = {"param": self._main, "exp_avg": self._adam.exp_avg, "exp_avg_sq": self._adam.exp_avg_sq}
        return {
            f"{kind}.{name}": part.view(parameter.shape)
            for kind, flat in flats.items()
            for (name, parameter), part in zip(self._parameters.items(), self._split(flat), strict=True)
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a whole state; raises CheckpointError, with nothing changed, if it is another model's."""
        own = self.state()
        wrong = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
        if wrong:
            raise UserError(
                f"the checkpoint is of another model, {len(wrong)} tensors differ, the first is {wrong[0]}: "
                "give the job another name, or leave `load` out"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        self._copy_to_model()


def _buckets(buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Cut the buffer, whose first `size` elements are the gradient; the last bucket has the rest, too."""
    wanted = max(FEWEST_BUCKETS, -(-size * buffer.element_size() // BUCKET_BYTES))
    count = min(wanted, size)
    cuts = [size * number // count for number in range(count)] + [len(buffer)]
    return tuple(buffer[first:end] for first, end in pairwise(cuts))
