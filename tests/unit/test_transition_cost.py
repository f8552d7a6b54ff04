"""D_transition by kind, and spares."""

import math

import pytest

from unicron_lib.errors import UserError
from unicron_lib.planning.spares import held_back, standby_nodes
from unicron_lib.planning.transition_cost import Bandwidths, Move, StateSource, source, transition_s, whole_replicas

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
        ({"moves": True, "has_replica": True, "is_in_memory": True}, StateSource.REPLICA),
        ({"moves": True, "has_replica": False, "is_in_memory": True}, StateSource.PEER_MEMORY),
        ({"moves": True, "has_replica": False}, StateSource.STORE),
    ],
)
def test_the_nearest_source_is_taken(seen: dict[str, bool], expected: StateSource) -> None:
    assert source(**seen) is expected


def test_a_replica_that_lost_a_part_is_lost() -> None:
    replicas = [("a", "b"), ("c", "d"), ("e",)]
    assert whole_replicas(replicas, {"a", "b", "c", "e"}) == 2
    assert whole_replicas(replicas, {"a", "c"}) == 0


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bandwidths_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="the bandwidth store is"):
        Bandwidths(store=value)


def exact(num_nodes: int, share: float, quantile: float) -> int:
    reached = 0.0
    for down in range(num_nodes + 1):
        reached += math.comb(num_nodes, down) * share**down * (1 - share) ** (num_nodes - down)
        if reached >= quantile:
            return down
    return num_nodes


@pytest.mark.parametrize("num_nodes", [1, 16, 128])
@pytest.mark.parametrize("repair_s", [3600.0, 86_400.0, 30 * 86_400.0])
def test_standbys_are_the_binomial_s_quantile(num_nodes: int, repair_s: float) -> None:
    node_mtbf_s = 6.2e7 / 8
    share = repair_s / (node_mtbf_s + repair_s)
    assert standby_nodes(num_nodes, node_mtbf_s=node_mtbf_s, repair_s=repair_s) == exact(num_nodes, share, 0.99)


def test_no_repair_time_needs_no_standby_and_no_working_time_needs_all() -> None:
    assert standby_nodes(16, node_mtbf_s=1e6, repair_s=0.0) == 0
    assert standby_nodes(16, node_mtbf_s=0.0, repair_s=1.0) == 16


def test_a_loss_uses_the_spares_up() -> None:
    assert [held_back(8, total_gpus=64, healthy_gpus=healthy) for healthy in (64, 60, 56, 40)] == [8, 4, 0, 0]
    assert held_back(8, total_gpus=4, healthy_gpus=4) == 4
