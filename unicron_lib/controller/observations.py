"""Observations that nobody has journalled yet. Pure: time is an argument."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from unicron_lib.agent.messages import GpuFault, NodeUnreachable, Observation

REMEMBERED_IDS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    observation: Observation
    since: float


class PendingObservations:
    """Each observation once, from its arrival until it is acknowledged; acknowledged ids are remembered."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._acknowledged: OrderedDict[str, None] = OrderedDict()

    def add(self, observation: Observation, *, now: float) -> bool:
        """Take in an observation; False if it has been acknowledged before and should be so again at once."""
        if observation.id in self._acknowledged:
            return False
        self._waiting.setdefault(observation.id, _Waiting(observation=observation, since=now))
        return True

    def acknowledge(self, ids: Iterable[str]) -> tuple[Observation, ...]:
        """They are journalled; the ones among them that were waiting."""
        done = []
        for name in ids:
            self._acknowledged[name] = None
            self._acknowledged.move_to_end(name)
            if waiting := self._waiting.pop(name, None):
                done.append(waiting.observation)
        while len(self._acknowledged) > REMEMBERED_IDS:
            self._acknowledged.popitem(last=False)
        return tuple(done)

    def knows(self, name: str) -> bool:
        """Whether an observation of that id is waiting or was acknowledged."""
        return name in self._waiting or name in self._acknowledged

    def select(self, *, now: float, job: str | None = None, min_age_s: float = 0.0) -> tuple[Observation, ...]:
        """What waits for at least `min_age_s`, oldest first; of `job` and of nodes that run it, or of everything."""
        return tuple(
            waiting.observation
            for waiting in self._waiting.values()
            if now - waiting.since >= min_age_s and (job is None or concerns(waiting.observation, job))
        )

    def next_due_s(self, *, now: float, min_age_s: float) -> float | None:
        """Seconds until the next waiting observation reaches `min_age_s`, None if there is none."""
        ages = [waiting.since + min_age_s - now for waiting in self._waiting.values()]
        return min((age for age in ages if age > 0), default=None)


def concerns(observation: Observation, job: str) -> bool:
    """Whether the health task of `job` has to see the observation."""
    if isinstance(observation.body, NodeUnreachable | GpuFault):
        return job in observation.body.jobs
    return observation.job == job
