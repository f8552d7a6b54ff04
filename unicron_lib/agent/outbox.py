"""Observations on their way to the controller: numbered, kept until acknowledged, the many of a flood in a file."""

from collections.abc import Iterable
from pathlib import Path

from unicron_lib.agent.messages import Body, Observation, from_agent
from unicron_lib.agent.spill import Spill

IN_MEMORY = 1000
"""Observations; those beyond wait in a file."""


class Outbox:
    """The observations of one life (`boot`) of the agent of `node`.

    The oldest `in_memory` are at hand, all later ones in the file `overflow`. Without a file everything is in memory.
    """

    def __init__(self, *, node: str, boot: str, overflow: Path | None = None, in_memory: int = IN_MEMORY) -> None:
        self._node = node
        self._boot = boot
        self._next = 0
        self._in_memory = in_memory
        self._kept: dict[int, Observation] = {}
        self._overflow = Spill(overflow) if overflow else None

    def __len__(self) -> int:
        """Observations that are not acknowledged yet."""
        return len(self._kept) + self._num_spilled

    @property
    def boot(self) -> str:
        """The life that is being observed."""
        return self._boot

    def add(self, body: Body, *, at: float) -> Observation:
        """Number what was seen at `at` (epoch seconds) and keep it."""
        observation = Observation(node=self._node, boot=self._boot, seq=self._next, at=at, body=body)
        self._next += 1
        if self._overflow is not None and (self._overflow or len(self._kept) >= self._in_memory):
            self._overflow.put(from_agent.dump_json(observation))
        else:
            self._kept[observation.seq] = observation
        return observation

    def pending_from(self, seq: int) -> tuple[Observation, ...]:
        """What is not acknowledged yet, at hand, and has a number of at least `seq`, oldest first.

        Acknowledgements bring what waits in the file to hand.
        """
        return tuple(observation for number, observation in self._kept.items() if number >= seq)

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """Forget observations that are journalled; numbers that are unknown or forgotten already are fine."""
        for seq in seqs:
            self._kept.pop(seq, None)
        if self._overflow and len(self._kept) <= self._in_memory // 2:
            for line in self._overflow.take(self._in_memory - len(self._kept)):
                observation = from_agent.validate_json(line)
                assert isinstance(observation, Observation)
                self._kept[observation.seq] = observation

    def start_over(self, boot: str) -> None:
        """Begin a new life: the old one has been given up as a whole, so nothing of it is worth telling."""
        self._boot = boot
        self._next = 0
        self._kept.clear()
        if self._overflow is not None:
            self._overflow.clear()

    @property
    def _num_spilled(self) -> int:
        return len(self._overflow) if self._overflow is not None else 0
