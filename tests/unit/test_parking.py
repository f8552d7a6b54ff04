"""A script that parks: what ends an attempt, what does not, and how the next one begins."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from listener import Listener

from unicron_lib.agent.beats import BeatReader
from unicron_lib.agent.rank_messages import FromRank, RankOrder, RankParked, from_rank
from unicron_lib.detection.sections import Section
from unicron_lib.training import session as session_module
from unicron_lib.training.abort import Breaker
from unicron_lib.training.parking import Parking, is_of_others
from unicron_lib.training.session import Session, session

LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2345"


def begin(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **listener.variables})  # an assignment changes more than is set here
    monkeypatch.setattr(session_module, "_present", None)
    monkeypatch.setattr(session_module, "write_to", lambda _: None)
    # nothing of the tests' own process is to be broken
    monkeypatch.setattr("unicron_lib.training.abort.break_connections", lambda: 0)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(tmp_path, parks=True)
    begin(listener, monkeypatch)
    yield listener
    listener.close()


def assign(agent: Listener, **variables: str) -> None:
    agent.order("assign", environment=agent.variables | {"UNICRON_GENERATION": "3", "RANK": "0", "WORLD_SIZE": "1"} | variables)


def heard(agent: Listener, kind: str) -> dict[str, object]:
    while (said := agent.hear())["type"] != kind:
        pass
    return said


def hear_that_it_parks(agent: Listener) -> None:
    while not heard(agent, "rank_hello")["parks"]:
        pass


def attempt_it(train: Callable[[Session, int], None]) -> int:
    """A script that parks; the number of its attempts."""
    number = 0
    with session() as run:
        for number, attempt in enumerate(run.attempts(), start=1):
            with attempt:
                train(run, number)
    return number


def lose_a_peer(*_: object) -> None:
    raise RuntimeError(LOST)


def test_outside_of_unicron_there_is_one_attempt_and_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_AGENT_SOCKET", raising=False)
    monkeypatch.setattr(session_module, "_present", None)
    assert attempt_it(lambda *_: None) == 1
    with pytest.raises(RuntimeError, match="Connection closed"):
        attempt_it(lose_a_peer)


def test_a_job_that_does_not_park_has_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(tmp_path)
    begin(listener, monkeypatch)
    with pytest.raises(RuntimeError, match="Connection closed"):
        attempt_it(lose_a_peer)
    assert not listener.hear()["parks"]
    assert not listener.hear()["parked"]
    listener.close()


def test_a_lost_peer_parks_the_rank_and_it_goes_on_as_whom_it_is_told_to_be(agent: Listener, tmp_path: Path) -> None:
    seen = []

    def train(run: Session, number: int) -> None:
        seen.append((os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["UNICRON_BEAT_FILE"]))
        run.step(4 + number)
        if number == 1:
            assign(agent, UNICRON_BEAT_FILE=str(tmp_path / "others"))
            lose_a_peer()

    attempt_it(train)
    assert seen == [("1", "2", str(tmp_path / "beats")), ("0", "1", str(tmp_path / "others"))]
    assert (agent.hear()["parks"], agent.hear()["parks"]) == (False, True)
    first = agent.hear()
    assert (first["generation"], first["rank"], first["iteration"], first.get("source", "")) == (2, 1, 5, "")
    failed = agent.hear()
    assert (failed["type"], failed["parked"], failed["iteration"]) == ("rank_failed", True, 5)
    second = agent.hear()
    assert (second["generation"], second["rank"], second["iteration"], second["source"]) == (3, 0, 6, "own memory")
    beat = BeatReader(tmp_path / "beats").read()
    assert beat is not None
    assert beat.section is Section.PARKED


def test_an_order_to_park_ends_the_attempt_after_a_step(agent: Listener) -> None:
    done = 0

    def train(run: Session, number: int) -> None:
        nonlocal done
        if number == 1:
            hear_that_it_parks(agent)
            agent.order("park")
            assign(agent)
            for done in range(1_000_000):
                run.step(done)

    assert attempt_it(train) == 2
    parked = heard(agent, "rank_parked")
    assert (parked["generation"], parked["iteration"]) == (2, done)


def test_who_was_ordered_to_park_at_once_does_so_even_if_it_is_through(agent: Listener) -> None:
    def train(run: Session, number: int) -> None:
        if number == 1:
            hear_that_it_parks(agent)
            agent.order("abort")
            while not run._parking.is_now:
                time.sleep(0.001)
            assign(agent)

    assert attempt_it(train) == 2
    assert heard(agent, "rank_parked")["generation"] == 2


def test_who_is_parked_says_so_again_when_it_is_asked() -> None:
    said: list[FromRank] = []
    parking = Parking(Breaker(), said.append)
    parked = RankParked(job="a", generation=2, rank=1, iteration=7, micro_batches=0)
    parking.park(parked, None)
    assert parking.take(RankOrder(order="abort"))
    assert said == [parked, parked]
    parking.take(RankOrder(order="assign"))
    assert parking.next_order(0.1) == RankOrder(order="assign")
    parking.take(RankOrder(order="park"))
    assert said == [parked, parked], "it is parked no more"
    assert parking.is_asked


def test_who_has_no_place_any_more_ends(agent: Listener) -> None:
    def train(*_: object) -> None:
        hear_that_it_parks(agent)
        agent.order("quit")
        lose_a_peer()

    with pytest.raises(SystemExit) as end:
        attempt_it(train)
    assert end.value.code == 0


def test_who_is_parked_without_an_agent_ends(agent: Listener) -> None:
    def train(*_: object) -> None:
        hear_that_it_parks(agent)
        agent.hang_up()
        lose_a_peer()

    with pytest.raises(SystemExit):
        attempt_it(train)


def test_who_is_parked_and_terminated_ends(agent: Listener) -> None:
    def train(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        lose_a_peer()

    with pytest.raises(SystemExit) as end:
        attempt_it(train)
    assert end.value.code == 128 + signal.SIGTERM


def test_a_mistake_of_the_scripts_own_is_told_and_ends_it(agent: Listener) -> None:
    def train(*_: object) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        attempt_it(train)
    failed = heard(agent, "rank_failed")
    assert (failed["error_type"], failed["parked"]) == ("KeyError", False)


class DistStoreError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    ("error", "alone", "ordered"),
    [
        (RuntimeError(LOST), True, True),
        (DistStoreError("wait timeout"), True, True),
        (ConnectionResetError(104, "Connection reset by peer"), True, True),
        (RuntimeError("the data server does not answer"), False, True),
        (OSError("bad file descriptor"), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (KeyError("Connection closed by peer"), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_what_tells_of_lost_peers(error: BaseException, *, alone: bool, ordered: bool) -> None:
    assert is_of_others(error, is_ordered=False) is alone
    assert is_of_others(error, is_ordered=True) is ordered


def test_a_hello_of_an_older_session_says_that_it_cannot_park() -> None:
    hello = from_rank.validate_json('{"type": "rank_hello", "job": "a", "generation": 1, "rank": 0, "pid": 7}')
    assert not hello.parks
