"""What the control host wants done with the state of a job: in a node's memory, and in the store while it trains."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMemory:
    """Compare the slots of `job` with their headers.

    Result: `slots`, a list of `{generation, iteration, num_bytes, part}`, and `skipped`, why others are not used.
    """

    step: str
    job: str
    type: Literal["find_memory"] = "find_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchMemory:
    """Copy a slot from the first of `holders`, `HOST:PORT`, that gives it, for `generation`, which is about to be launched.

    It is of a `part` of the state, or of all of it.
    Result: `holder`, `num_bytes`, `seconds`.
    """

    step: str
    job: str
    generation: int
    slot_generation: int
    iteration: int
    holders: tuple[str, ...]
    part: str = ""
    type: Literal["fetch_memory"] = "fetch_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetMemory:
    """Remove the slots of generations below: the job has ended. Result: `removed`, their number."""

    step: str
    job: str
    below_generation: int
    type: Literal["forget_memory"] = "forget_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Have rank 0 of a generation, which lives here and trains, save a checkpoint with the others, and train on.

    Result: `iteration`, the last one that is complete now. What is saved is a later one.
    """

    step: str
    job: str
    generation: int
    type: Literal["save_checkpoint"] = "save_checkpoint"
