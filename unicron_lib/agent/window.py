"""How many observations an agent has under way at once. Pure."""

from collections.abc import Iterable
from itertools import islice

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.outbox import Outbox

WINDOW = 256


class Window:
    """One connection's view of the outbox: everything in its order, never more than `size` without an answer.

    So a flood waits with its agent, where it started, and not in the memory of the controller.
    """

    def __init__(self, outbox: Outbox, *, size: int = WINDOW) -> None:
        self._outbox = outbox
        self._size = size
        self._next = 0
        self._under_way: set[int] = set()

    def take(self) -> tuple[Observation, ...]:
        """What is to be sent now, oldest first: it counts as sent."""
        room = self._size - len(self._under_way)
        if room <= 0:
            return ()
        taken = tuple(islice(self._outbox.pending_from(self._next), room))
        if taken:
            self._next = taken[-1].seq + 1
            self._under_way.update(observation.seq for observation in taken)
        return taken

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """The controller's journal has them: the outbox forgets them, and others may follow."""
        seqs = tuple(seqs)
        self._under_way.difference_update(seqs)
        self._outbox.acknowledge(seqs)
