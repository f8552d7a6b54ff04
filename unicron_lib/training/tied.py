"""The gradient of the tied embedding, whose halves two stages have."""

import torch

from unicron_lib.training.siblings import Siblings


class Tied:
    """The first and the last stage's half of the tied embedding's gradient, each of which the other one needs."""

    def __init__(self, own: torch.Tensor, siblings: Siblings) -> None:
        self._own, self._other = own, torch.empty_like(own)
        self._siblings = siblings

    def fetch(self) -> None:
        """Get the other half; nothing of the own one is changed."""
        across = self._siblings.layout.pp - 1
        self._siblings.swap(self._own, self._other, by=across if self._siblings.is_first else -across)

    def whole(self) -> torch.Tensor:
        """The sum, the same bits at both ends."""
        return self._own + self._other

    def complete(self) -> None:
        """Replace the own half by the sum."""
        self._own.add_(self._other)
