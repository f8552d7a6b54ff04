"""A rank's part of a copy of a job's training state: parameters, moments, and the flat buffer that gradients are summed in."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from unicron_lib.checkpointing.model_state import TIED, of_the_state, owned_at, parameters
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.training import megatron
from unicron_lib.training.optimizer import AdamW, clip, learning_rate
from unicron_lib.training.pipeline import work_off
from unicron_lib.training.siblings import Siblings
from unicron_lib.training.tied import Tied

BUCKET_BYTES = 25 << 20
FEWEST_BUCKETS = 4
"""Small models have several buckets, too: they are what large ones are tried out with."""
SPIKE_FACTOR = 1000.0
ID_BASE = 1 << 20
"""Sample numbers travel in two digits to this base: float32 holds each exactly."""
NUM_TOLD = 5
"""What travels before the samples: the loss, two flags, and two counts of votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What the ranks of an iteration told each other along with the gradient; `loss` is the mean over the global batch.

    `grad_norm` is the L2 norm of the whole gradient before clipping, known after the step. `is_resumed` tells that the
    iteration was begun in an earlier generation. Ranks of cut replicas `keep` the state in host memory together, and
    it `travels` to other nodes.
    """

    loss: float
    stop: bool
    save: bool
    samples: list[int]
    grad_norm: float = 0.0
    is_resumed: bool = False
    keep: bool = False
    travels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples and their [batch, seq_length + 1] tokens; they are the `first` and following ones of the iteration."""

    number: int
    iteration: int
    first: int
    samples: Sequence[int]
    tokens: torch.Tensor

    @property
    def place(self) -> str:
        """Where it is in the training: what is random in it depends on that."""
        return f"{self.iteration}/{self.first}"


class Replica:
    """The model with its optimizer: what ranks with the same place in their replicas have of it is equal after every iteration.

    A rank without `siblings` has the whole model. Otherwise it computes together with them, and sums up a micro-batch's
    gradient apart until it is complete.

    All parameters are views of one flat buffer, in an order that puts those with weight decay first. Gradients are
    summed over micro-batches in a second one of float32 (float64 for a float64 model), scaled by the number of
    micro-batches of the whole job: any split of them among ranks gives the same sum. The buffer's tail carries the
    loss, flags, votes and the samples to the other ranks, as a part of the last bucket.

    `buckets` are the parts of the buffer that are summed over the ranks one after another, by number: the same in every layout.
    """

    def __init__(self, spec: JobSpec, device: torch.device, siblings: Siblings | None = None) -> None:
        self._spec = spec
        self.device = device
        self.siblings = siblings or Siblings()
        self._model = megatron.Model(spec, device, self.siblings)
        named = sorted(self._model.parameters.items(), key=lambda item: item[1].dim() < 2)
        self._parameters = dict(named)
        num_decayed = sum(p.numel() for p in self._parameters.values() if p.dim() >= 2)
        size = sum(p.numel() for p in self._parameters.values())
        dtype = torch.float64 if spec.params_dtype == "float64" else torch.float32
        self._main = torch.cat([p.detach().reshape(-1).to(dtype) for p in self._parameters.values()])
        self._adam = AdamW(self._main, num_decayed=num_decayed, weight_decay=spec.weight_decay)
        self.buffer = torch.zeros(size + NUM_TOLD + 3 * spec.global_batch_size, dtype=dtype, device=device)
        self._gradient, self._tail = self.buffer[:size], self.buffer[size:]
        whole_size = sum(math.prod(it.shape) for it in parameters(spec))
        self.buckets = _buckets(self.buffer, size, even_size=whole_size // self.siblings.layout.replica_size)
        self.spare = torch.empty(max(map(len, self.buckets)), dtype=dtype, device=device)
        self._model_gradient = torch.zeros(size, dtype=megatron.DTYPES[spec.params_dtype], device=device)
        self._is_mixed = self._model_gradient.dtype != dtype
        self._is_apart = self._is_mixed or not self.siblings.are_none
        self._is_corrupt = False
        self._tie()
        self._tied = Tied(self._gradient_of(TIED), self.siblings) if self._has_half_of_tied else None
        self._norm: float | None = None
        self._loss = 0.0

    def _tie(self) -> None:
        """Make gradients, and parameters where the dtype is the main one's, views of the flat buffers."""
        gradients = self._model_gradient if self._is_apart else self._gradient
        for parameter, main, gradient in zip(
            self._parameters.values(), self._split(self._main), self._split(gradients), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
            if not self._is_mixed:
                parameter.data = main.view_as(parameter)

    def _split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(flat, [parameter.numel() for parameter in self._parameters.values()])

    @property
    def _has_half_of_tied(self) -> bool:
        """Whether another stage has the other half of the tied embedding's gradient."""
        return self.siblings.layout.pp > 1 and TIED in self._parameters

    def _gradient_of(self, name: str) -> torch.Tensor:
        return dict(zip(self._parameters, self._split(self._gradient), strict=True))[name]

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

    def add_micro_batches(self, batches: Iterable[MicroBatch], poll: Callable[[], None] = lambda: None) -> Iterator[MicroBatch]:
        """Add the gradients and losses of micro-batches; yields each one when they are there. `poll` may raise.

        What is random in one, dropout, depends on the job's seed and its place only, not on who computes it, nor how often.
        Raises CollectiveFailed when a sibling is lost: what was yielded is there then, and nothing else.
        """
        if self.siblings.layout.pp > 1:
            yield from work_off(self, tuple(batches), self.siblings, poll)
            return
        for batch in batches:
            poll()
            self.add_micro_batch(batch)
            yield batch

    def add_micro_batch(self, batch: MicroBatch) -> None:
        """Add one, without a pipeline."""
        self.backward(batch, self.forward(batch, None), None)

    def forward(self, batch: MicroBatch, arrived: torch.Tensor | None) -> torch.Tensor:
        """What the next stage needs, or the batch's part of the loss."""
        output = self._model.forward(batch.tokens, arrived, place=batch.place)
        return output / self._spec.num_micro_batches if self.siblings.is_last else output

    def backward(self, batch: MicroBatch, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add the gradients, with what travels with them; all of them, or none if siblings are lost meanwhile."""
        try:
            self._model.backward(output, gradient)
        except BaseException:
            self._model_gradient.zero_()
            raise
        if self._is_apart:
            self._gradient.add_(self._model_gradient)
            self._model_gradient.zero_()
        if self._is_corrupt:
            self._flip_a_bit()
        if self.siblings.is_last:
            self._tail[0] += output.detach()
        marks = [(1, *divmod(sample, ID_BASE)) for sample in batch.samples]
        rows = self._tail[NUM_TOLD:].view(-1, 3)
        rows[batch.first : batch.first + len(marks)] += torch.tensor(marks, dtype=self._tail.dtype, device=self.device)

    def blank(self, batch: MicroBatch) -> torch.Tensor:
        """Room for what a stage gives to the next one, or for its gradient."""
        spec = self._spec
        shape = (spec.seq_length, len(batch.samples), spec.hidden_size)
        return torch.empty(shape, dtype=megatron.DTYPES[spec.params_dtype], device=self.device)

    def flag(self, *, stop: bool, save: bool, spoil: bool, votes: tuple[float, float] = (0.0, 0.0)) -> None:
        """Tell the others: stop after this iteration, save after it, and the `votes` for keeping and sending its state.

        `spoil` is an injected fault, a loss of nan.
        """
        self._tail[1:NUM_TOLD] = torch.tensor([float(stop), float(save), *votes])
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

    def reduced(self, *, heeds_stop: bool = True, on_ready: Callable[[], None] = lambda: None) -> Reduced:
        """Read what came with the all-reduce of `buffer`; a sample that several ranks have added is listed as often.

        Siblings tell each other what they have of the loss, the flags and the gradient's norm: raises CollectiveFailed.
        Before that `on_ready` is called: nothing else is lacking then.
        A flag to stop that is not to be heeded is not told, and nor are the votes that came with it.
        """
        tail = self._tail.tolist()
        rows = zip(*(iter(tail[NUM_TOLD:]),) * 3, strict=True)
        samples = [int(high) * ID_BASE + int(low) if count == 1 else -int(count) for count, high, low in rows]
        stop, save = float(heeds_stop and tail[1] > 0), float(tail[2] > 0)
        if self.siblings.are_none:
            return Reduced(loss=tail[0], stop=stop > 0, save=save > 0, samples=samples)
        tells_loss = self.siblings.is_last and self.siblings.place.tp == 0
        votes = tail[3:NUM_TOLD] if heeds_stop else (-1.0, -1.0)
        squares = self._squares()
        on_ready()
        told = self.siblings.exchange(tail[0] if tells_loss else 0.0, stop, save, squares, *votes)
        self._loss, stop, save, squares, keep, travel = (sum(part) for part in zip(*told, strict=True))
        self._norm = math.sqrt(squares)
        common = {"keep": keep > 0, "travels": travel >= 0}
        return Reduced(loss=self._loss, stop=stop > 0, save=save > 0, samples=samples, **common)

    def _squares(self) -> float:
        """The rank's part of the square of the gradient's norm: what several siblings have counts once."""
        if self._tied:
            self._tied.fetch()
        owned = owned_at(self._spec, self.siblings.layout, self.siblings.place)
        parts = zip(self._parameters, self._split(self._gradient), strict=True)
        wanted = [self._tied.whole() if self._tied and name == TIED else part for name, part in parts if name in owned]
        return float(torch.stack([part.square().sum() for part in wanted]).sum())

    def learn(self, *, loss: float, norm: float) -> None:
        """What siblings have told each other and this rank has missed: then it can `step`."""
        self._loss, self._norm = loss, norm

    def step(self, iteration: int) -> float:
        """Apply the summed gradient; returns its norm. Raises FloatingPointError before anything is changed.

        Siblings have to have called `reduced` before.
        """
        norm = self._norm if self._norm is not None else float(self._gradient.norm())
        loss = self._loss if self._norm is not None else float(self._tail[0])
        self._norm = None
        if norm - norm != 0.0 or loss - loss != 0.0:
            raise FloatingPointError(
                f"iteration {iteration}: the loss is {loss} and the gradient's norm {norm}; nothing was applied"
            )
        if self._tied:
            self._tied.complete()
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
        self._model.initialize()
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

    @property
    def slices(self) -> dict[str, TensorSlice]:
        """Where the tensors of the state lie in the whole ones."""
        return of_the_state(self._model.slices)

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


def _buckets(buffer: torch.Tensor, size: int, *, even_size: int) -> tuple[torch.Tensor, ...]:
    """Cut the buffer, whose first `size` elements are the gradient; the last bucket has the rest, too.

    All ranks of a replica have equally many; `even_size` is the number of elements that each would have if all had the same.
    """
    wanted = max(FEWEST_BUCKETS, -(-even_size * buffer.element_size() // BUCKET_BYTES))
    count = min(wanted, size)
    cuts = [size * number // count for number in range(count)] + [len(buffer)]
    return tuple(buffer[first:end] for first, end in pairwise(cuts))
