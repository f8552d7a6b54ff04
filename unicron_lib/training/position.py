"""How far a replica is."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Position:
    """The last iteration (0-based) that is complete in a replica's parameters, -1 for none, and its loss."""

    iteration: int = -1
    loss: float = 0.0
