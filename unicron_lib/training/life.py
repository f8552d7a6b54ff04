"""A rank's life as a table: what an order means in each state. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

Order = Literal[
    "drain", "park", "abort", "assign", "save", "save_replica", "quit", "raise", "nan", "spike", "corrupt", "slow", "exit"
]


class State(StrEnum):
    """Where a rank is.

    `starting`: in its first generation, before the first iteration; `reconfiguring`: the same in a later one, to which it
    brings its memory; `training`; `draining`: it saves its last state together with the others, or was told to; `parked`: it
    waits with its state in memory; `done`: it has said its last word.
    """

    STARTING = "starting"
    TRAINING = "training"
    PARKED = "parked"
    RECONFIGURING = "reconfiguring"
    DRAINING = "draining"
    DONE = "done"


class Act(StrEnum):
    """What an order makes the rank do."""

    DRAIN = "save and stop at the end of the iteration"
    PARK_AT_END = "park at the end of the iteration"
    PARK_NOW = "park now, breaking what it waits for"
    SAY_AGAIN = "say again that it is parked"
    SAVE_AT_END = "save a checkpoint at the end of the iteration, and train on"
    HAND_ON = "give it to the thread that waits for it"
    REFUSE = "log it, and do nothing"


_BEGINNING = (State.STARTING, State.RECONFIGURING)
_FAULT: Mapping[State, Act] = dict.fromkeys((*_BEGINNING, State.TRAINING, State.DRAINING), Act.HAND_ON)
_BY_THE_PARKED: Mapping[State, Act] = {State.PARKED: Act.HAND_ON}
TABLE: Mapping[Order, Mapping[State, Act]] = MappingProxyType(
    {
        "drain": dict.fromkeys((*_BEGINNING, State.TRAINING, State.DRAINING), Act.DRAIN),
        "park": dict.fromkeys(_BEGINNING, Act.PARK_NOW) | {State.TRAINING: Act.PARK_AT_END, State.PARKED: Act.SAY_AGAIN},
        "abort": dict.fromkeys((*_BEGINNING, State.TRAINING, State.DRAINING), Act.PARK_NOW) | {State.PARKED: Act.SAY_AGAIN},
        "save": dict.fromkeys((*_BEGINNING, State.TRAINING), Act.SAVE_AT_END),
        "assign": _BY_THE_PARKED,
        "save_replica": _BY_THE_PARKED,
        "quit": _BY_THE_PARKED,
        "raise": _FAULT,
        "nan": _FAULT,
        "spike": _FAULT,
        "corrupt": _FAULT,
        "slow": _FAULT,
        "exit": _FAULT,
    }
)
"""What is not in it is refused. Before the first iteration nobody waits for this rank's gradient, so a `park` need not wait for
the others'; while the last state is saved, `park` is refused, since a drain and the job's end go on, and only `abort` stops
them."""


def act_on(order: Order, state: State) -> Act:
    """What `order` means to a rank in `state`."""
    return TABLE[order].get(state, Act.REFUSE)
