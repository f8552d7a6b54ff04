"""Observations that nobody has journalled yet. Pure: time is an argument."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import GpuFault, NodeUnreachable, Observation

REMEMBERED_IDS = 20_000
MOST_WAITING = 1024
"""Of one life of an agent. It sends no more than twice `unicron_lib.agent.window.WINDOW` before it waits for answers."""
MOST_AT_ONCE = 64
"""In one answer: who asks gets the next ones once these are acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    observation: Observation
    since: float


class PendingObservations:
    """Each observation once, from its arrival until it is acknowledged; acknowledged ids are remembered."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._num_waiting: Counter[tuple[str, str]] = Counter()
        self._acknowledged: OrderedDict[str, None] = OrderedDict()

    def has_room(self, node: str, boot: str) -> bool:
        """Whether another observation of that life of an agent may be taken in."""
        return self._num_waiting[node, boot] < MOST_WAITING

    def add(self, observation: Observation, *, now: float) -> bool:
        """Take in an observation; False if it has been acknowledged before and should be so again at once."""
        if observation.id in self._acknowledged:
            return False
        if observation.id not in self._waiting:
            self._waiting[observation.id] = _Waiting(observation=observation, since=now)
            self._num_waiting[observation.node, observation.boot] += 1
        return True

    def acknowledge(self, ids: Iterable[str]) -> tuple[Observation, ...]:
        """They are journalled; the ones among them that were waiting."""
        done = []
        for name in ids:
            self._acknowledged[name] = None
            self._acknowledged.move_to_end(name)
            if waiting := self._waiting.pop(name, None):
                done.append(waiting.observation)
        self._num_waiting.subtract((seen.node, seen.boot) for seen in done)
        self._num_waiting += Counter()  # forgets the lives of which nothing waits
        while len(self._acknowledged) > REMEMBERED_IDS:
            self._acknowledged.popitem(last=False)
        return tuple(done)

    def knows(self, name: str) -> bool:
        """Whether an observation of that id is waiting or was acknowledged."""
        return name in self._waiting or name in self._acknowledged

    def select(self, *, now: float, job: str | None = None, min_age_s: float = 0.0) -> tuple[Observation, ...]:
        """What waits for at least `min_age_s`, `MOST_AT_ONCE` at most; of `job` and of nodes that run it, or of everything.

        Oldest first of each agent, the agents in turn: none has to wait until another one has told all it has. What the
        controller itself saw comes beside what the agent of that node said, not after it.
        """
        speakers: dict[tuple[str, str, bool], list[Observation]] = {}
        for waiting in self._waiting.values():
            seen = waiting.observation
            if now - waiting.since >= min_age_s and (job is None or concerns(seen, job)):
                speakers.setdefault((seen.node, seen.boot, seen.seq < 0), []).append(seen)
        return tuple(islice(_in_turn(speakers.values()), MOST_AT_ONCE))

    def next_due_s(self, *, now: float, min_age_s: float) -> float | None:
        """Seconds until the next waiting observation reaches `min_age_s`, None if there is none."""
        ages = [waiting.since + min_age_s - now for waiting in self._waiting.values()]
        return min((age for age in ages if age > 0), default=None)


def concerns(observation: Observation, job: str) -> bool:
    """Whether the health task of `job` has to see the observation."""
    if isinstance(observation.body, NodeUnreachable | GpuFault | NodeLeaving):
        return job in observation.body.jobs
    return observation.job == job


def _in_turn(speakers: Iterable[list[Observation]]) -> Iterator[Observation]:
    rounds = chain.from_iterable(zip_longest(*speakers))
    return (observation for observation in rounds if observation is not None)
