"""The words between a rank and its agent: frozen dataclasses, JSON lines over a Unix socket.

Wall clocks are epoch seconds of the sender.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, TypeAdapter

NAN_STAYS_NAN = ConfigDict(ser_json_inf_nan="constants")
"""For what a loss travels in: it may be NaN, for which pydantic writes null unless told otherwise."""

SLOT = "slot of "
"""How the source of a state begins that was in the host memory of a node."""

# --- rank -> agent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """First line of a rank, and another one once it can park: our trainer always can, a command if its script says so."""

    job: str
    generation: int
    rank: int
    pid: int
    parks: bool = False
    type: Literal["rank_hello"] = "rank_hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An iteration is done. `flops` is the achieved FLOP/s of the whole job over it.

    `compute_s` is what this rank needs before it enters the gradients' all-reduce, if all ranks had equally many
    micro-batches; 0 if it was not measured. `iteration_s` is without checkpoints. `grad_norm` is the L2 norm of the job's whole
    gradient before clipping, 0 if it was not measured.

    The rest tells how this rank came into its generation, and stays the same in it: the `source` of its state ("own memory",
    "rank 2", "slot of node-1", with " (resharded from tp=2 pp=3)" if another layout has kept it, a manifest's key, "" for a
    fresh start), what was copied, and of the iteration that was under way how many micro-batches it kept, computed in place
    of a lost rank, and discarded: these it had complete, and their results go into the training nowhere.
    """

    job: str
    generation: int
    rank: int
    iteration: int
    loss: float
    iteration_s: float
    flops: float
    world_size: int
    at: float
    compute_s: float = 0.0
    grad_norm: float = 0.0
    source: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    kept_micro_batches: int = 0
    recomputed_micro_batches: int = 0
    discarded_micro_batches: int = 0
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """An exception in a rank, told before anything else dies; `parked` ranks keep their state and wait.

    `iteration` is the last one that is complete in this rank's parameters. `cause` is the earliest exception that this one
    was raised from, as "Type: message", `context` the earliest that was being handled; empty if there is none. `spoiled` are
    the first and the last iteration whose results cannot be trusted, if there are such; with the `verdict` the rank asks for
    its node to be isolated.
    """

    job: str
    generation: int
    rank: int
    iteration: int
    error_type: str
    message: str
    traceback: str
    parked: bool
    cause: str = ""
    context: str = ""
    spoiled: tuple[int, int] | None = None
    verdict: Literal["", "exclude"] = ""
    type: Literal["rank_failed"] = "rank_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParked:
    """The rank waits, as it was ordered to, with its state in memory: for an assignment, or for its end.

    `micro_batches` are those of the iteration under way whose gradients it keeps.
    """

    job: str
    generation: int
    rank: int
    iteration: int
    micro_batches: int
    type: Literal["rank_parked"] = "rank_parked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrained:
    """The rank stopped at an iteration's end, or saved its replica; `manifest` is the key of the committed checkpoint."""

    job: str
    generation: int
    rank: int
    iteration: int
    manifest: str | None
    type: Literal["rank_drained"] = "rank_drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """The rank completed `train_iters` and the last checkpoint is committed.

    That of a command, of whom the agent tells this, only speaks for itself, and not for the `whole_job`.
    """

    job: str
    generation: int
    rank: int
    iteration: int
    loss: float
    whole_job: bool = True
    type: Literal["rank_finished"] = "rank_finished"


# --- agent -> rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """`drain`: save and stop at the next common iteration's end. `park`: the same, but keep the state in memory and wait.

    `abort`: park at once, breaking whatever the rank waits for. `assign`: a parked rank becomes the one of the `environment`.
    `save`, to rank 0: all ranks save at the end of an iteration, and train on.
    `save_replica`: a parked rank saves all it has, alone, as the UNICRON_GENERATION of the `environment` if it has one; the
    first rank of a replica then commits what all of its ranks have saved.
    `quit`: a parked rank exits. `raise`, `nan`, `spike`, `corrupt`, `slow`, `exit`: injected faults; a slow rank takes `amount`
    times as long for its part of each iteration, one that exits does so with the code `amount`; for a spike the gradient is
    wrong for `amount` iterations, that of a corrupt rank a little from then on; what is raised is the `text`, `TYPE: message`.
    """

    order: Literal[
        "drain", "park", "abort", "assign", "save", "save_replica", "quit", "raise", "nan", "spike", "corrupt", "slow", "exit"
    ]
    amount: float = 0.0
    text: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    type: Literal["rank_order"] = "rank_order"


FromRank = RankHello | Progress | RankFailed | RankParked | RankDrained | RankFinished

from_rank: TypeAdapter[FromRank] = TypeAdapter(Annotated[FromRank, Discriminator("type")], config=NAN_STAYS_NAN)
rank_order: TypeAdapter[RankOrder] = TypeAdapter(RankOrder)
