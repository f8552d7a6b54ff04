"""Observations on their way to the controller: numbered, kept until acknowledged. Pure."""

from collections.abc import Iterable

from unicron_lib.agent.messages import Body, Observation


class Outbox:
    """The observations of one life (`boot`) of the agent of `node`."""

    def __init__(self, *, node: str, boot: str) -> None:
        self._node = node
        self._boot = boot
        self._next = 0
        self._kept: dict[int, Observation] = {}

    @property
    def boot(self) -> str:
        """The life that is being observed."""
        return self._boot

    @property
    def pending(self) -> tuple[Observation, ...]:
        """What is not acknowledged yet, oldest first."""
        return tuple(self._kept.values())

    def add(self, body: Body, *, at: float) -> Observation:
        """Number what was seen at `at` (epoch seconds) and keep it."""
        observation = Observation(node=self._node, boot=self._boot, seq=self._next, at=at, body=body)
        self._kept[self._next] = observation
        self._next += 1
        return observation

    def pending_from(self, seq: int) -> tuple[Observation, ...]:
        """What is not acknowledged yet and has a number of at least `seq`, oldest first."""
        return tuple(observation for number, observation in self._kept.items() if number >= seq)

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """Forget observations that are journalled; numbers that are unknown or forgotten already are fine."""
        for seq in seqs:
            self._kept.pop(seq, None)

    def start_over(self, boot: str) -> None:
        """Begin a new life: the old one has been given up as a whole, so nothing of it is worth telling."""
        self._boot = boot
        self._next = 0
        self._kept.clear()
