"""The ranks of one replica, as one of them sees them: a line shares each layer (tp), stages follow on each other (pp).

The model holds its groups for as long as it lives; who is in them changes with every generation.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron_lib.domain.plans import Layout, Place
from unicron_lib.training.peers import CollectiveFailed, Peers


class _Broken(BaseException):
    """CollectiveFailed on its way through torch, which looks groups up that it does not know when it sees an Exception."""

    def __init__(self, failure: CollectiveFailed) -> None:
        super().__init__(str(failure))
        self.error_type = failure.error_type


class _Done(dist.Work):
    """The work of a collective that has been waited for."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - as torch has it
        return True


class StandIn(dist.ProcessGroup):
    """A group that is no backend's: it knows its size, and hands all-reduces on to the line of the present generation."""

    def __init__(self, siblings: "Siblings", *, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._siblings = siblings

    def allreduce(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> dist.Work:  # type: ignore[override]
        """Sum over the line; waits for it."""
        for tensor in tensors:
            self._siblings.sum_in_line(tensor)
        return _Done()


class Siblings:
    """A rank's `place` among the ranks of its replica, and, while they are `met`, those ranks."""

    def __init__(self, layout: Layout = Layout(), place: Place = Place()) -> None:  # noqa: B008 - both are frozen
        self.layout, self.place = replace(layout, dp=1), replace(place, dp=0)
        self._line: Peers | None = None
        self._replica: Peers | None = None

    @property
    def are_none(self) -> bool:
        """Whether the rank is a replica by itself."""
        return self.layout.replica_size == 1

    def has(self, layout: Layout, place: Place) -> bool:
        """Whether a rank at `place` of `layout` holds what this one does."""
        return (replace(layout, dp=1), replace(place, dp=0)) == (self.layout, self.place)

    @property
    def part(self) -> str:
        """The name of what the rank has of a state, "" if that is all of it."""
        return self.layout.part(self._at(self.place.pp))

    @property
    def is_first(self) -> bool:
        """Whether the rank's stage is the first one."""
        return self.place.pp == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank's stage is the last one, which knows the loss."""
        return self.place.pp == self.layout.pp - 1

    @contextmanager
    def met(self, *, line: Peers, replica: Peers) -> Iterator[None]:
        """In the block, the ranks are these."""
        self._line, self._replica = line, replica
        try:
            yield
        finally:
            self._line = self._replica = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In the block, the model may need the others; raises CollectiveFailed."""
        try:
            yield
        except _Broken as broken:
            failure = CollectiveFailed(broken.error_type, str(broken))
        else:
            return
        raise failure

    def sum_in_line(self, tensor: torch.Tensor) -> None:
        """Sum over the line, for the model: to be called in `computing`."""
        assert self._line is not None
        try:
            self._line.sum(tensor)
        except CollectiveFailed as error:
            broken = _Broken(error)
        else:
            return
        raise broken

    def exchange(self, *mine: float) -> list[tuple[float, ...]]:
        """Everybody's numbers, in the order of the places; raises CollectiveFailed."""
        if self.are_none:
            return [mine]
        form = f"<{len(mine)}d"
        return [struct.unpack(form, told) for told in self._others.exchange(struct.pack(form, *mine))]

    def give_on(self, tensor: torch.Tensor, *, by: int) -> None:
        """To the rank with the same slice, `by` stages further; raises CollectiveFailed, as the others do."""
        self._others.send(tensor, self._at(self.place.pp + by))

    def take_from(self, tensor: torch.Tensor, *, by: int) -> None:
        """What the rank with the same slice, `by` stages further, gives on."""
        self._others.receive(tensor, self._at(self.place.pp + by))

    def swap(self, give: torch.Tensor, take: torch.Tensor, *, by: int) -> None:
        """Both at once."""
        self._others.swap(give, take, self._at(self.place.pp + by))

    @property
    def _others(self) -> Peers:
        assert self._replica is not None
        return self._replica

    def _at(self, stage: int) -> int:
        return stage * self.layout.tp + self.place.tp
