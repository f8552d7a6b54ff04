"""D_transition by kind: what it costs a job to go on elsewhere, by where its state comes from (the cheapest source wins)."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.planning.cadence import SHARE, UNMEASURED_S
from unicron_lib.planning.model_profile import iteration_flops
from unicron_lib.planning.throughput import model_of

STATE_BYTES = 14
"""Bytes a parameter that move: bf16 weight 2, float32 master weight 4, the two moments of Adam 8."""
COPY_BYTES_S = 5e9
"""Bytes of a state that are copied within host memory in a second: cautious."""
MOST_REDO_S = 86_400.0
"""More than this is not believed to be lost: somebody has written a throughput that is far too small."""


class StateSource(StrEnum):
    """Where a new generation takes its state from, nearest first; a replica is that of ranks which live on."""

    NOTHING = "nothing"
    REPLICA = "replica"
    PEER_MEMORY = "peer_memory"
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bytes a second at which a job's whole state arrives from each source.

    Raises UserError for one that is not a finite number above zero.
    """

    replica: float = 1e9
    peer_memory: float = 5e9
    store: float = 2e9

    def __post_init__(self) -> None:
        for key in self.__slots__:
            value = getattr(self, key)
            if not (isfinite(value) and value > 0):
                raise UserError(f"the bandwidth {key} is {value} bytes a second, it must be a finite number above 0")


DEFAULT = Bandwidths()
"""Cautious: whoever is new copies the state from a rank that lives on, over one TCP connection of a 10 Gbit/s network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What moving one job takes.

    `base_s` is the time of stopping and starting ranks, `state_bytes` what must be there before the first iteration, and
    `redo_s` the work since the newest checkpoint, which is done again if only the object store has the state; since the newest
    copy in host memory it is `redo_in_memory_s`.
    """

    base_s: float
    state_bytes: float = 0.0
    redo_s: float = 0.0
    redo_in_memory_s: float = 0.0


def move_of(spec: JobSpec, flops: float) -> Move:
    """The move of a job that does `flops` FLOP/s: on average half a save interval is lost with its replicas.

    Of what is kept in host memory, too, half of the time between two copies is lost. What a command has to load and to repeat
    only its owner knows, who puts it into `transition_s`.
    """
    if spec.command:
        return Move(base_s=spec.transition_s)
    model = model_of(spec)
    iteration_s = iteration_flops(model) / flops if flops > 0 else 0.0
    state_bytes = float(STATE_BYTES * model.num_params)
    between_s = spec.save_interval * iteration_s if spec.save_interval else UNMEASURED_S
    copies_s = spec.memory_interval * iteration_s if spec.memory_interval else state_bytes / COPY_BYTES_S / SHARE
    return Move(
        base_s=spec.transition_s,
        state_bytes=state_bytes,
        redo_s=min(between_s / 2, MOST_REDO_S),
        redo_in_memory_s=min(max(copies_s, iteration_s) / 2, MOST_REDO_S),
    )


def source(
    move: Move, *, moves: bool, has_replica: bool, is_in_memory: bool = False, bandwidths: Bandwidths = DEFAULT
) -> StateSource:
    """The cheapest source that there is: a live data-parallel replica, a checkpoint in a peer's memory, the object store.

    Of equally cheap ones the nearest.
    """
    if not moves:
        return StateSource.NOTHING
    nearer = ((StateSource.REPLICA, has_replica), (StateSource.PEER_MEMORY, is_in_memory))
    available = [origin for origin, is_there in nearer if is_there]
    return min([*available, StateSource.STORE], key=lambda origin: transition_s(move, origin, bandwidths))


def transition_s(move: Move, origin: StateSource, bandwidths: Bandwidths = DEFAULT) -> float:
    """Seconds of training that a job loses if its state comes from `origin`."""
    match origin:
        case StateSource.NOTHING:
            return 0.0
        case StateSource.REPLICA:
            return move.base_s + move.state_bytes / bandwidths.replica
        case StateSource.PEER_MEMORY:
            return move.base_s + move.state_bytes / bandwidths.peer_memory + move.redo_in_memory_s
        case StateSource.STORE:
            return move.base_s + move.state_bytes / bandwidths.store + move.redo_s


def relayout_s(move: Move, *, is_saved: bool, is_in_memory: bool = False, bandwidths: Bandwidths = DEFAULT) -> float:
    """Seconds that a job loses if its layout changes: its state comes from nodes, if it `is_in_memory` there, or the store.

    Nothing is done again if it `is_saved` first, by ranks that all live or by one replica that has the whole state.
    """
    saving_s = move.state_bytes / bandwidths.store if is_saved else 0.0
    left = replace(move, redo_s=0.0, redo_in_memory_s=0.0) if is_saved else move
    origin = source(left, moves=True, has_replica=False, is_in_memory=is_in_memory, bandwidths=bandwidths)
    return saving_s + transition_s(left, origin, bandwidths)
