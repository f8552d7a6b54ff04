"""Observations on their way to the controller: numbered, kept until acknowledged, the many of a flood in a file."""

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from unicron_lib.agent.messages import Body, NodeNotice, Observation
from unicron_lib.agent.speaker import LOST, Speaker, speaker_of

IN_MEMORY = 1000
"""Observations of one speaker; those beyond wait in a file."""


class Outbox:
    """The observations of one life (`boot`) of the agent of `node`, those of each speaker in their order.

    Of each speaker the oldest `in_memory` are at hand, all later ones in a file whose name begins with `overflow`. Without
    that everything is in memory. What got lost nevertheless is told as a notice.
    """

    def __init__(self, *, node: str, boot: str, overflow: Path | None = None, in_memory: int = IN_MEMORY) -> None:
        self._node = node
        self._boot = boot
        self._next = self._num_files = 0
        self._in_memory = in_memory
        self._overflow = overflow
        self._speakers: dict[str, Speaker] = {}
        self._num_lost, self._tell_at = 0, 1

    def __len__(self) -> int:
        """Observations that are not acknowledged yet."""
        return sum(map(len, self._speakers.values()))

    @property
    def boot(self) -> str:
        """The life that is being observed."""
        return self._boot

    def add(self, body: Body, *, at: float) -> Observation:
        """Number what was seen at `at` (epoch seconds) and keep it."""
        observation = Observation(node=self._node, boot=self._boot, seq=self._next, at=at, body=body)
        self._next += 1
        self._speaker(speaker_of(body)).add(observation)
        self._tell_losses()
        return observation

    @property
    def at_hand(self) -> Mapping[str, Collection[Observation]]:
        """What is not acknowledged yet, by speaker, oldest first. Acknowledgements bring what waits in files to hand."""
        return {name: speaker.kept.values() for name, speaker in self._speakers.items()}

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """Forget observations that are journalled; numbers that are unknown or forgotten already are fine."""
        done = set(seqs)
        for name, speaker in list(self._speakers.items()):
            speaker.acknowledge(done)
            if not len(speaker):
                del self._speakers[name]
        self._tell_losses()

    def start_over(self, boot: str) -> None:
        """Begin a new life: the old one has been given up as a whole, so nothing of it is worth telling."""
        self._boot = boot
        self._next, self._num_lost, self._tell_at = 0, 0, 1
        for speaker in self._speakers.values():
            speaker.clear()
        self._speakers.clear()

    def _speaker(self, name: str) -> Speaker:
        if name not in self._speakers:
            self._num_files += 1
            file = self._overflow.with_name(f"{self._overflow.name}-{self._num_files}") if self._overflow else None
            self._speakers[name] = Speaker(in_memory=self._in_memory, overflow=file, lost=self._lose)
        return self._speakers[name]

    def _lose(self, count: int) -> None:
        self._num_lost += count

    def _tell_losses(self) -> None:
        """At the first, and whenever there are ten times as many."""
        if self._num_lost < self._tell_at:
            return
        self._tell_at = 10 ** len(str(self._num_lost))
        text = f"{self._num_lost} observations of this node were lost before they could be told: see the agent's log"
        self.add(NodeNotice(code=LOST, text=text), at=time.time())
