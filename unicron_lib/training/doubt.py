"""Since when a rank doubts its own loss: a decision to go back may come late, and must find a checkpoint from before."""

from typing import assert_never

from unicron_lib.detection.loss_guard import LossGuard, Point, Recovered, RollBack, Spiking


class Doubt:
    """Follows the loss as the train run does, from generation to generation; None for the patience: the loss is not watched."""

    def __init__(self, patience_iters: int | None = None) -> None:
        self._guard = None if patience_iters is None else LossGuard(patience_iters=patience_iters)
        self.since: int | None = None
        """The first iteration of a spike that has not passed, and that was not gone back from."""

    def look(self, generation: int, point: Point) -> None:
        """One more iteration; one that comes again begins another course."""
        if self._guard is None:
            return
        if self.since is not None and point.iteration <= self.since:
            self.since = None
        for verdict in self._guard.look(generation, (point,)):
            match verdict:
                case Spiking(first=first) | RollBack(first=first):
                    self.since = first
                case Recovered():
                    self.since = None
                case _:
                    assert_never(verdict)
