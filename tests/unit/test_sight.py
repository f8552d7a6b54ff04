"""Many nodes that fall silent together: it is the controller that does not see, for a while."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.controller.liveness import GOODBYE, Contact, Verdict, judge
from unicron_lib.controller.sight import AT_ONCE_S, BLIND_S, Sight

STEP_S = 0.05


class Cluster:
    """Nodes that speak each second as long as they are heard, and what the controller concludes."""

    def __init__(self, num_nodes: int, *, blind_s: float = BLIND_S) -> None:
        self.now = 1000.0
        self.sight = Sight(blind_s=blind_s)
        self.contacts = {f"n{number}": Contact(heard_at=self.now) for number in range(num_nodes)}
        self.lost: dict[str, float] = {}

    def run(self, seconds: float, *, silent: Iterable[str] = ()) -> None:
        silent = set(silent)
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for name in self.contacts.keys() - silent - self.lost.keys():
                self.contacts[name] = Contact(heard_at=self.now)
            living = {name: contact for name, contact in self.contacts.items() if name not in self.lost}
            self.sight.look(self.now, living)
            for name, contact in living.items():
                if judge(self.now, contact)[0] is Verdict.LOST and not self.sight.excuses(name):
                    self.lost[name] = self.now

    def end(self, names: Iterable[str], ending: str) -> None:
        for name in names:
            self.contacts[name] = Contact(heard_at=self.contacts[name].heard_at, ended_at=self.now, ending=ending)

    def names(self, first: int, last: int) -> list[str]:
        return [f"n{number}" for number in range(first, last)]

    def lost_after(self, since: float) -> dict[str, float]:
        return {name: at - since for name, at in self.lost.items()}


@pytest.mark.parametrize(
    ("num_silent", "num_nodes", "after_s"),
    [(1, 1, 5), (1, 2, 5), (2, 4, 5), (5, 10, 5), (2, 2, 60), (2, 3, 60), (3, 4, 60), (9, 10, 60)],
)
def test_more_than_half_of_the_nodes_are_judged_late(num_silent: int, num_nodes: int, after_s: float) -> None:
    cluster = Cluster(num_nodes)
    cluster.run(10)
    silent = cluster.names(0, num_silent)
    cluster.run(70, silent=silent)
    assert cluster.lost_after(1010.0) == dict.fromkeys(silent, pytest.approx(after_s, abs=0.1))
    assert cluster.sight.outage is None


def test_a_blink_of_the_network_costs_no_node() -> None:
    """Half of the connections are reset, the others swallow; the agents dial again one after the other."""
    cluster = Cluster(10)
    cluster.run(10)
    cluster.end(cluster.names(0, 5), "its connection was reset")
    cluster.run(40, silent=cluster.names(0, 10))
    assert cluster.sight.outage is not None
    assert cluster.sight.outage.text == "10 of 10 nodes fell silent within 3 s: the controller may be blind"
    for back in range(10):
        cluster.run(1, silent=cluster.names(back, 10))
    cluster.run(1)
    assert cluster.lost == {}
    assert cluster.sight.outage is None
    since = cluster.now
    cluster.run(6, silent=["n3"])
    assert cluster.lost_after(since) == {"n3": pytest.approx(5, abs=0.1)}, "a single one is judged as ever"


def test_two_blinks_one_after_the_other_cost_no_node() -> None:
    cluster = Cluster(10)
    for _ in range(2):
        cluster.run(15, silent=cluster.names(0, 10))
        cluster.run(8, silent=cluster.names(0, 2))
    cluster.run(1)
    assert cluster.lost == {}


def test_who_stays_away_when_the_others_are_back_is_lost_soon() -> None:
    cluster = Cluster(10)
    cluster.run(20, silent=cluster.names(0, 10))
    back_at = cluster.now
    cluster.run(60, silent=["n0"])
    assert cluster.lost_after(back_at) == {"n0": pytest.approx(15, abs=0.2)}


def test_a_node_that_dies_while_the_controller_is_blind_is_judged_with_the_others() -> None:
    cluster = Cluster(4)
    cluster.run(10, silent=cluster.names(0, 3))
    cluster.run(60, silent=cluster.names(0, 4))
    assert cluster.lost_after(1000.0) == dict.fromkeys(cluster.names(0, 4), pytest.approx(60, abs=0.2))


def test_nodes_that_go_one_after_the_other_are_no_blindness() -> None:
    cluster = Cluster(4)
    for gone in range(1, 5):
        cluster.run(AT_ONCE_S + 0.5, silent=cluster.names(0, gone))
    cluster.run(6, silent=cluster.names(0, 4))
    first, *_ = cluster.lost_after(1000.0).values()
    assert first == pytest.approx(5, abs=0.1)
    assert len(cluster.lost) == 4


def test_agents_that_said_goodbye_are_no_sign_of_blindness() -> None:
    cluster = Cluster(4)
    cluster.end(cluster.names(0, 4), GOODBYE)
    cluster.run(4, silent=cluster.names(0, 4))
    assert cluster.lost_after(1000.0) == dict.fromkeys(cluster.names(0, 4), pytest.approx(3, abs=0.1))


def test_it_can_be_switched_off() -> None:
    cluster = Cluster(2, blind_s=0.0)
    cluster.run(6, silent=cluster.names(0, 2))
    assert cluster.lost_after(1000.0) == dict.fromkeys(cluster.names(0, 2), pytest.approx(5, abs=0.1))


@given(st.lists(st.tuples(st.floats(1, 40), st.sets(st.integers(0, 3))), max_size=6))
def test_nobody_is_lost_early_and_nobody_is_silent_for_ever(story: list[tuple[float, set[int]]]) -> None:
    cluster = Cluster(4)
    for seconds, silent in story:
        cluster.run(seconds, silent={f"n{number}" for number in silent})
    dead = [name for name in cluster.contacts if name not in cluster.lost]
    cluster.run(BLIND_S + 15.0, silent=dead)
    assert set(cluster.lost) == set(cluster.contacts)
    for name, at in cluster.lost.items():
        silent_s = at - cluster.contacts[name].heard_at
        assert 5.0 - STEP_S <= silent_s <= BLIND_S + 10.0
