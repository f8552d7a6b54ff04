"""The other ranks of a generation, as one of them sees them."""

from typing import Protocol

import torch


class CollectiveFailed(Exception):
    """A peer is gone or out of reach. Holds words only: a traceback would keep the broken group's sockets open."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class Parked(Exception):
    """The rank leaves its iteration because the agent said so (`abort`): what it has computed of it is kept."""


class Peers(Protocol):
    """What the ranks of one generation do together. Each of them makes the same calls in the same order.

    Every method raises CollectiveFailed when a peer that it needs is gone, and so does every later call that needs it; a
    tensor that was being written is worthless then. A method returns when its result is there, on a GPU, too. Tensors are
    contiguous and of the same shape and dtype on both sides. They live on the rank's device.
    """

    @property
    def rank(self) -> int:
        """The number of the rank that sees them, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, tensor: torch.Tensor) -> None:
        """All-reduce: the sum over all ranks replaces `tensor`, bit by bit the same on each of them."""

    def exchange(self, mine: bytes) -> list[bytes]:
        """All-gather of a few bytes, of any length: everybody's, by rank."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Give `tensor` to a rank that calls `receive` for it."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with what the rank `source` sends."""

    def swap(self, give: torch.Tensor, take: torch.Tensor, other: int) -> None:
        """Give one tensor to a rank and fill another one with what it sends, at once: neither waits for the other's turn."""


class Alone:
    """The peers of a rank that is the only one."""

    rank, size = 0, 1

    def sum(self, tensor: torch.Tensor) -> None:
        """The sum over one rank."""

    def exchange(self, mine: bytes) -> list[bytes]:
        """What the only one says."""
        return [mine]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """There is nobody to send to."""
        raise NotImplementedError

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """There is nobody to receive from."""
        raise NotImplementedError

    def swap(self, give: torch.Tensor, take: torch.Tensor, other: int) -> None:
        """There is nobody to swap with."""
        raise NotImplementedError
