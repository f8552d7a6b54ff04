"""What an order means to a rank depends on where it is."""

from typing import get_args

import pytest

from unicron_lib.agent.rank_messages import RankOrder
from unicron_lib.training.life import TABLE, Act, Order, State, act_on


def test_every_order_has_a_meaning_in_every_state() -> None:
    assert set(TABLE) == set(get_args(Order)) == set(get_args(RankOrder.__annotations__["order"]))
    assert {act_on(order, state) for order in get_args(Order) for state in State} == set(Act)


@pytest.mark.parametrize(
    ("order", "acts"),
    [
        ("drain", {"starting": "DRAIN", "training": "DRAIN", "reconfiguring": "DRAIN", "draining": "DRAIN"}),
        (
            "park",
            {"starting": "PARK_NOW", "training": "PARK_AT_END", "parked": "SAY_AGAIN", "reconfiguring": "PARK_NOW"},
        ),
        (
            "abort",
            {
                "starting": "PARK_NOW",
                "training": "PARK_NOW",
                "parked": "SAY_AGAIN",
                "reconfiguring": "PARK_NOW",
                "draining": "PARK_NOW",
            },
        ),
        ("save", {"starting": "SAVE_AT_END", "training": "SAVE_AT_END", "reconfiguring": "SAVE_AT_END"}),
        ("assign", {"parked": "HAND_ON"}),
        ("save_replica", {"parked": "HAND_ON"}),
        ("quit", {"parked": "HAND_ON"}),
    ],
)
def test_an_order_that_does_not_fit_is_refused(order: Order, acts: dict[str, str]) -> None:
    assert {state: act_on(order, state) for state in State} == {
        state: Act[acts[state]] if state in acts else Act.REFUSE for state in State
    }


@pytest.mark.parametrize("order", get_args(Order))
def test_nobody_is_heard_once_the_last_word_is_said(order: Order) -> None:
    assert act_on(order, State.DONE) is Act.REFUSE
