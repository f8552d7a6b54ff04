"""A whole copy of a job's training state: parameters, moments, and the flat buffer that gradients are summed in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.training import megatron
from unicron_lib.training.optimizer import AdamW, clip, learning_rate

ID_BASE = 1 << 20
"""Sample numbers travel in two digits to this base: float32 holds each exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What the ranks of an iteration told each other along with the gradient; `loss` is the mean over the global batch.

    `grad_norm` is the L2 norm of the whole gradient before clipping, known after the step.
    """

    loss: float
    stop: bool
    save: bool
    samples: list[int]
    grad_norm: float = 0.0


class Replica:
    """The model with its optimizer, all ranks' equal after every iteration.

    All parameters are views of one flat buffer, in an order that puts those with weight decay first. Gradients are
    summed over micro-batches in a second one of float32 (float64 for a float64 model), scaled by the number of
    micro-batches of the whole job: any split of them among ranks gives the same sum. The buffer's tail carries the
    loss, two flags and the samples to the other ranks, in the same all-reduce.
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
        self._model_gradient = torch.zeros(size, dtype=megatron.DTYPES[spec.params_dtype], device=device)
        self._is_mixed = self._model_gradient.dtype != dtype
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

    # --- one iteration ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Clear the gradient and what travels with it."""
        self.buffer.zero_()

    def add_micro_batch(self, samples: Sequence[int], tokens: torch.Tensor, *, first: int) -> None:
        """Add the gradient and loss of a micro-batch; its samples are the `first` and following ones of the iteration."""
        loss = megatron.loss_of(self._model, tokens) / self._spec.num_micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        if self._is_mixed:
            self._gradient.add_(self._model_gradient)
            self._model_gradient.zero_()
        self._tail[0] += loss.detach()
        marks = [(1, *divmod(sample, ID_BASE)) for sample in samples]
        rows = self._tail[3:].view(-1, 3)
        rows[first : first + len(samples)] += torch.tensor(marks, dtype=self._tail.dtype, device=self.device)

    def flag(self, *, stop: bool, save: bool, spoil: bool) -> None:
        """Tell the others: stop after this iteration, save after it; `spoil` is an injected fault, a loss of nan."""
        self._tail[1], self._tail[2] = float(stop), float(save)
        if spoil:
            self.buffer[: len(self._gradient) + 1] = float("nan")

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
