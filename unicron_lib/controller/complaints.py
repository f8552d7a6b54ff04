"""What ranks say of others that they have lost: of a node whose connection has ended, it is a second witness."""

from collections.abc import Iterable

from unicron_lib.agent.messages import Observation, RankInfo
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.controller.liveness import Complaint
from unicron_lib.detection.classify import classify

KEPT_S = 60.0
"""Only what comes at about the same time as a connection's end counts."""


class Complaints:
    """The newest one of each node, of the newest generation of each job that has any."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, Complaint]] = {}

    def hear(self, observation: Observation, *, now: float) -> None:
        """Keep it, if it is what the peer of a lost rank reports; `now` is monotonic."""
        body = observation.body
        if not isinstance(body, RankFailed) or (failure := classify(observation)) is None or not failure.is_echo:
            return
        told = self._jobs.get(body.job, {})
        newest = max((it.generation for it in told.values()), default=-1)
        if body.generation >= newest:
            kept = told if body.generation == newest else {}
            mine = Complaint(job=body.job, generation=body.generation, rank=body.rank, reporter=observation.node, at=now)
            recent = {job: by for job, by in self._jobs.items() if max(map(_at, by.values())) > now - KEPT_S}
            self._jobs = {**recent, body.job: {**kept, observation.node: mine}}

    def about(self, node: str, ranks: Iterable[RankInfo]) -> Complaint | None:
        """The newest one of another node that may be about these `ranks` of `node`."""
        jobs = {(rank.job, rank.generation) for rank in ranks}
        told = (it for job, _ in jobs for it in self._jobs.get(job, {}).values())
        return max((it for it in told if it.reporter != node and (it.job, it.generation) in jobs), key=_at, default=None)


def _at(complaint: Complaint) -> float:
    return complaint.at
