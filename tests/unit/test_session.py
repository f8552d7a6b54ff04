"""A script's session, alone and with somebody who listens."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from listener import Listener

from unicron_lib.agent.beats import BeatReader
from unicron_lib.detection.sections import Section
from unicron_lib.training import session as session_module
from unicron_lib.training.environment import read_environment
from unicron_lib.training.session import session
from unicron_lib.training.stopping import CommonStop


def test_outside_of_unicron_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_AGENT_SOCKET", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with session() as run:
        run.step(0, loss=1.0)
        with run.section("checkpoint"):
            pass
        assert not run.should_stop
        assert signal.getsignal(signal.SIGTERM) is before
        with (
            pytest.raises(ValueError, match="there is no section 'lunch': the sections are setup, eval, checkpoint"),
            run.section("lunch"),
        ):
            pass
    with pytest.raises(KeyError), session():
        raise KeyError("x")


def test_the_import_is_cheap() -> None:
    code = "import unicron_lib.training.session, sys; print({'torch', 'megatron', 'prefect', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(tmp_path)
    for name, value in listener.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session_module, "_present", None)
    yield listener
    listener.close()


def test_steps_are_told(agent: Listener) -> None:
    with session() as run:
        run.step(7, loss=2.5, flops=1e9)
    hello, progress = agent.hear(), agent.hear()
    assert (hello["type"], hello["rank"], hello["pid"]) == ("rank_hello", 1, os.getpid())
    assert (progress["iteration"], progress["loss"], progress["world_size"]) == (7, 2.5, 2)
    assert progress["flops"] == pytest.approx(1e9 / progress["iteration_s"])


def test_an_exception_is_told_before_the_script_ends(agent: Listener, tmp_path: Path) -> None:
    def script() -> None:
        with session() as run:
            run.step(0)
            raise ZeroDivisionError("by 0")

    with pytest.raises(ZeroDivisionError):
        script()
    told = [agent.hear() for _ in range(3)][-1]
    assert (told["type"], told["error_type"], told["message"], told["iteration"]) == (
        "rank_failed",
        "ZeroDivisionError",
        "by 0",
        0,
    )
    assert "test_session.py" in str(told["traceback"])
    assert "ZeroDivisionError: by 0" in (tmp_path / "error.json").read_text()


def test_sections_are_seen_and_do_not_count_as_part_of_the_step(agent: Listener, tmp_path: Path) -> None:
    with session() as run:
        reader = BeatReader(tmp_path / "beats")
        assert reader.read().section is Section.SETUP
        run.step(0)
        assert reader.read().section is Section.STEP
        with run.section("checkpoint"):
            assert reader.read().section is Section.CHECKPOINT
        run.step(1)
        assert (reader.read().iteration, reader.read().section) == (1, Section.STEP)


def test_a_drain_asks_for_a_stop_and_the_end_is_told(agent: Listener) -> None:
    with session() as run:
        run.step(0)
        agent.hear()
        agent.order("drain")
        step = 1
        while not run.should_stop:
            run.step(step)
            step += 1
    heard = agent.hear()
    while heard["type"] == "progress":
        heard = agent.hear()
    assert (heard["type"], heard["manifest"]) == ("rank_drained", None)


def test_sigterm_asks_for_a_stop_and_the_scripts_own_handler_is_called(agent: Listener) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: seen.append(signum))
    try:
        with session() as run:
            run.step(0)
            assert not run.should_stop
            os.kill(os.getpid(), signal.SIGTERM)
            run.step(1)
            assert run.should_stop
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_injected_faults_are_suffered_at_the_next_step(agent: Listener) -> None:
    def steps() -> None:
        with session() as run:
            agent.hear()
            agent.order("raise", text="MyError: from outside")
            for step in count():
                run.step(step)

    with pytest.raises(Exception, match="from outside") as caught:
        steps()
    assert type(caught.value).__name__ == "MyError"


def test_a_second_session_of_the_process_uses_the_same_connection(agent: Listener) -> None:
    with session() as first:
        first.step(0)
    with session() as second:
        second.step(1)
    assert [agent.hear()["type"] for _ in range(3)] == ["rank_hello", "progress", "progress"]


def test_without_a_listener_the_script_goes_on(agent: Listener) -> None:
    agent.close()
    agent.path.unlink()
    with session() as run:
        run.step(0)
        assert not run.should_stop


class Shelf:
    """A store of two ranks."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        return self.held[key].encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.held.get(key, "") == expected:
            self.held[key] = desired
        return self.held[key].encode()


def test_all_ranks_stop_after_the_same_step(agent: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lib.training.stopping._uses_torch", lambda: True)
    shelf = Shelf()
    first, second = (CommonStop(read_environment(agent.variables)) for _ in range(2))
    first._store = second._store = shelf
    assert not first.is_due(4, asked=False)
    assert not second.is_due(4, asked=True), "asked after step 4, the first may be in step 5 already"
    assert first.is_due(5, asked=False)
    assert second.is_due(5, asked=True)


def test_a_store_that_is_gone_leaves_each_rank_alone(agent: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lib.training.stopping._uses_torch", lambda: True)

    class Gone(Shelf):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("gone")

    stop = CommonStop(read_environment(agent.variables))
    stop._store = Gone()
    assert not stop.is_due(4, asked=False)
    assert stop.is_due(5, asked=True)
