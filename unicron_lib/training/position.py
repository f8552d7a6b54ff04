"""How far a replica is."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Position:
    """The last iteration (0-based) that is complete in a replica's parameters, -1 for none, and its loss.

    `generation` is the one that has applied or loaded it: replicas with both numbers equal are equal bit by bit. `is_whole` is
    False before the replica has a state, and while one is being copied into it.
    """

    iteration: int = -1
    loss: float = 0.0
    generation: int = -1
    is_whole: bool = False
