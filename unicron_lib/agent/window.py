"""How many observations an agent has under way at once. Pure."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.outbox import Outbox

WINDOW, SHARE = 256, 64
"""Observations without an answer, and of them those of one speaker."""


class Window:
    """One connection's view of the outbox: what each speaker says in its order, about `size` of it without an answer.

    So a flood waits with its agent, where it started, and not in the memory of the controller. One speaker has `share` of it
    at most, and who has nothing under way finds room in as much again, so that nobody is hidden by a flood, not even if those
    that should answer it do not. Never more than twice `size` is under way.
    """

    def __init__(self, outbox: Outbox, *, size: int = WINDOW, share: int = SHARE) -> None:
        self._outbox = outbox
        self._size = size
        self._share = share
        self._under_way: dict[int, str] = {}

    def take(self) -> tuple[Observation, ...]:
        """What is to be sent now, of each speaker the oldest first: it counts as sent."""
        busy = Counter(self._under_way.values())
        known = frozenset(self._under_way)
        waiting = {name: (o for o in told if o.seq not in known) for name, told in self._outbox.at_hand.items()}
        queues = {name: islice(told, max(0, self._share - busy[name])) for name, told in waiting.items()}
        taken = []
        while queues:
            for name, queue in list(queues.items()):
                room = self._size if busy[name] else 2 * self._size
                observation = next(queue, None) if len(self._under_way) < room else None
                if observation is None:
                    del queues[name]
                    continue
                busy[name] += 1
                self._under_way[observation.seq] = name
                taken.append(observation)
        return tuple(taken)

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """The controller's journal has them: the outbox forgets them, and others may follow."""
        seqs = tuple(seqs)
        for seq in seqs:
            self._under_way.pop(seq, None)
        self._outbox.acknowledge(seqs)
