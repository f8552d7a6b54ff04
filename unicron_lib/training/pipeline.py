"""One forward, one backward: the order in which a pipeline stage works its micro-batches off.

A stage begins with as many forward passes as stages come after it, then does a backward pass after each forward one
(Narayanan et al. 2021, section 2.2.1): no stage holds more activations than there are stages.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from unicron_lib.training.siblings import Siblings

Batch = TypeVar("Batch")
In_contra = TypeVar("In_contra", contravariant=True)


class Stage(Protocol[In_contra]):
    """What a stage computes."""

    def forward(self, batch: In_contra, arrived: torch.Tensor | None) -> torch.Tensor:
        """The output, for the last stage the loss; nothing has arrived at the first one."""

    def backward(self, batch: In_contra, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add the gradients, given the output's, None for the loss."""

    def blank(self, batch: In_contra) -> torch.Tensor:
        """Room for what goes from stage to stage, there or back."""


def work_off(
    stage: Stage[Batch], batches: Sequence[Batch], siblings: Siblings, poll: Callable[[], None] = lambda: None
) -> Iterator[Batch]:
    """Compute all batches; yields each one when its gradients are there. `poll` is called before each pass, and may raise.

    Raises CollectiveFailed; what was yielded is done.
    """
    count = len(batches)
    ahead = min(siblings.layout.pp - 1 - siblings.place.pp, count)
    in_flight: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    arrived = _take_input(stage, siblings, batches[0]) if batches else None
    for number in range(count + ahead):
        gradient: torch.Tensor | None = None
        old = batches[number - ahead] if number >= ahead else None
        new = batches[number] if number < count else None
        following = batches[number + 1] if number + 1 < count else None
        if new is not None:
            poll()
            output = stage.forward(new, arrived)
            in_flight.append((arrived, output))
            gradient = _give_output(stage, siblings, output, old)
        elif old is not None and not siblings.is_last:
            gradient = stage.blank(old)
            siblings.take_from(gradient, by=1)
        if old is None:
            arrived = _take_input(stage, siblings, following) if following is not None else None
            continue
        poll()
        entered, output = in_flight.pop(0)
        stage.backward(old, output, gradient)
        yield old  # at once: what comes next may fail
        arrived = _give_gradient(stage, siblings, entered, following)


def _take_input(stage: Stage[Batch], siblings: Siblings, batch: Batch) -> torch.Tensor | None:
    if siblings.is_first:
        return None
    arriving = stage.blank(batch)
    siblings.take_from(arriving, by=-1)
    return arriving.requires_grad_()


def _give_output(stage: Stage[Batch], siblings: Siblings, output: torch.Tensor, old: Batch | None) -> torch.Tensor | None:
    """Give the output on, and take the gradient of an earlier batch, if one is due."""
    if siblings.is_last:
        return None
    output = output.detach()
    if old is None:
        siblings.give_on(output, by=1)
        return None
    gradient = stage.blank(old)
    siblings.swap(output, gradient, by=1)
    return gradient


def _give_gradient(
    stage: Stage[Batch], siblings: Siblings, entered: torch.Tensor | None, following: Batch | None
) -> torch.Tensor | None:
    """Give the input's gradient back, and take the following input, if there is one."""
    if entered is None:
        return None
    assert entered.grad is not None
    if following is None:
        siblings.give_on(entered.grad, by=-1)
        return None
    arriving = stage.blank(following)
    siblings.swap(entered.grad, arriving, by=-1)
    return arriving.requires_grad_()
