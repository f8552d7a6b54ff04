"""D_transition by kind, and spares."""

import math
from dataclasses import replace
from functools import partial

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.planning.cadence import SHARE
from unicron_lib.planning.model_profile import iteration_flops
from unicron_lib.planning.spares import held_back
from unicron_lib.planning.throughput import model_of
from unicron_lib.planning.transition_cost import (
    COPY_BYTES_S,
    Bandwidths,
    Move,
    StateSource,
    move_of,
    relayout_s,
    source,
    transition_s,
)

MOVE = Move(base_s=10.0, state_bytes=98e9, redo_s=300.0)
"""A 7B model with a checkpoint every 10 minutes."""


def test_each_kind_has_its_price() -> None:
    fast = Bandwidths(replica=49e9, peer_memory=9.8e9, store=2e9)
    assert transition_s(MOVE, StateSource.NOTHING, fast) == 0.0
    assert transition_s(MOVE, StateSource.REPLICA, fast) == pytest.approx(12.0)
    assert transition_s(MOVE, StateSource.PEER_MEMORY, fast) == pytest.approx(20.0)
    assert transition_s(MOVE, StateSource.STORE, fast) == pytest.approx(10.0 + 49.0 + 300.0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"moves": False, "has_replica": True}, StateSource.NOTHING),
        ({"moves": True, "has_replica": True}, StateSource.REPLICA),
        ({"moves": True, "has_replica": True, "is_in_memory": True}, StateSource.PEER_MEMORY),
        ({"moves": True, "has_replica": False, "is_in_memory": True}, StateSource.PEER_MEMORY),
        ({"moves": True, "has_replica": False}, StateSource.STORE),
    ],
)
def test_the_cheapest_source_that_is_there_is_taken(seen: dict[str, bool], expected: StateSource) -> None:
    assert source(MOVE, **seen) is expected


def test_a_replica_behind_a_slow_network_is_left_for_a_fresh_checkpoint() -> None:
    slow, fresh = Bandwidths(replica=1e8), Move(base_s=10.0, state_bytes=98e9, redo_s=5.0)
    assert source(fresh, moves=True, has_replica=True, bandwidths=slow) is StateSource.STORE


def test_of_equally_cheap_sources_the_nearest_is_taken() -> None:
    nothing = Move(base_s=10.0)
    assert source(nothing, moves=True, has_replica=True, is_in_memory=True) is StateSource.REPLICA


def test_what_is_kept_in_memory_is_priced_by_how_often_it_is_copied() -> None:
    spec = JobSpec(job="a", num_layers=24, hidden_size=2048, save_interval=100, memory_interval=5)
    flops = iteration_flops(model_of(spec)) / 2.0  # two seconds an iteration
    move = move_of(spec, flops)
    assert (move.redo_s, move.redo_in_memory_s) == (pytest.approx(100.0), pytest.approx(5.0))
    by_default = move_of(replace(spec, memory_interval=None), flops)
    assert by_default.redo_in_memory_s == pytest.approx(move.state_bytes / COPY_BYTES_S / SHARE / 2)
    instant = move_of(replace(spec, memory_interval=None), flops / 1e3)
    assert instant.redo_in_memory_s == pytest.approx(1000.0), "an iteration is the least"
    lost = MOVE.redo_s - 1.0
    assert transition_s(replace(MOVE, redo_in_memory_s=lost), StateSource.PEER_MEMORY) == pytest.approx(10.0 + 19.6 + lost)


def test_a_change_of_layout_is_priced_by_where_its_state_is() -> None:
    links, move = Bandwidths(peer_memory=9.8e9, store=2e9), replace(MOVE, redo_in_memory_s=4.0)
    price = partial(relayout_s, move, bandwidths=links)
    assert price(is_saved=True) == pytest.approx(10.0 + 49.0 + 49.0)
    assert price(is_saved=False) == pytest.approx(10.0 + 49.0 + 300.0)
    assert price(is_saved=True, is_in_memory=True) == pytest.approx(10.0 + 49.0 + 10.0)
    assert price(is_saved=False, is_in_memory=True) == pytest.approx(10.0 + 10.0 + 4.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bandwidths_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="the bandwidth store is"):
        Bandwidths(store=value)


def test_a_loss_uses_the_spares_up() -> None:
    assert [held_back(8, total_gpus=64, healthy_gpus=healthy) for healthy in (64, 60, 56, 40)] == [8, 4, 0, 0]
    assert held_back(8, total_gpus=4, healthy_gpus=4) == 4
