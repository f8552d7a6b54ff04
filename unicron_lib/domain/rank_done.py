"""A rank of a job with a command came to its end: the one event that a job's own ranks tell one by one."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDone:
    """A rank of a job with a command has ended well; the job has when all ranks of the generation have."""

    id: str
    at: float
    job: str
    generation: int
    rank: int
    iteration: int
    type: Literal["rank_done"] = "rank_done"
