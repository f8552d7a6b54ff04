"""Who on a node tells something, and what of it has not arrived yet: one's flood hides nobody else's word."""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from pydantic import ValidationError

from unicron_lib.agent.messages import Body, NodeNotice, Observation, OfNode, from_agent
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.agent.spill import Spill

LOST = "observations_lost"
"""The notice's code: so many were lost on the node."""


def speaker_of(body: Body) -> str:
    """Who tells it: a rank of a job, or what watches the hardware, by what it tells."""
    match body:
        case NodeNotice(code=code):
            return code
        case _:
            return body.type if isinstance(body, OfNode) else f"{body.job}/{body.rank}"


class Speaker:
    """The observations of one speaker, in their order: the oldest `in_memory` are at hand, all later ones in `spill`.

    Without a file everything is at hand. `lost` is told how many observations are gone for good, if any are.
    """

    def __init__(self, *, in_memory: int, overflow: Path | None, lost: Callable[[int], None]) -> None:
        self.kept: dict[int, Observation] = {}
        self._in_memory = in_memory
        self._lost = lost
        self._spill = Spill(overflow, lost=lost) if overflow else None

    def __len__(self) -> int:
        """Observations that are not acknowledged yet."""
        return len(self.kept) + (len(self._spill) if self._spill is not None else 0)

    def add(self, observation: Observation) -> None:
        """Keep it. If neither disk nor memory has room, the newest of what can be told without end is lost."""
        if self._spill is not None and (self._spill or len(self.kept) >= self._in_memory):
            endless = isinstance(observation.body, RankFailed | NodeNotice)
            self._spill.put(from_agent.dump_json(observation), may_drop=endless)
        else:
            self.kept[observation.seq] = observation

    def acknowledge(self, seqs: AbstractSet[int]) -> None:
        """Forget observations, and bring what waits in the file to hand."""
        for seq in self.kept.keys() & seqs:
            del self.kept[seq]
        while self._spill and len(self.kept) <= self._in_memory // 2:
            self._bring(self._spill.take(self._in_memory - len(self.kept)))

    def clear(self) -> None:
        """Forget everything."""
        self.kept.clear()
        if self._spill is not None:
            self._spill.clear()

    def _bring(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                observation = from_agent.validate_json(line)
            except ValidationError:
                self._lost(1)
                continue
            assert isinstance(observation, Observation)
            self.kept[observation.seq] = observation
