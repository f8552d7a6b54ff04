"""How far a replica is."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Position:
    """The last iteration (0-based) that is complete in a replica's parameters, -1 for none, and its loss.

    `grad_norm` is that of its gradient, None where only the state is known.
    `generation` is the one that has applied or loaded it: replicas with both numbers equal are equal bit by bit. `is_whole` is
    False before the replica has a state, and while one is being copied into it.
    """

    iteration: int = -1
    loss: float = 0.0
    generation: int = -1
    is_whole: bool = False
    grad_norm: float | None = None

    def advance(self, iteration: int, *, generation: int, loss: float, grad_norm: float | None) -> None:
        """The state is now the one after an iteration that a generation has applied or loaded."""
        self.iteration, self.generation, self.loss, self.grad_norm = iteration, generation, loss, grad_norm
