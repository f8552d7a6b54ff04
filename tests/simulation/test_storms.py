"""Storms on the production core: whatever comes together, invariants hold, and all is well once it is calm."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import storm
from storm_store import Store

from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memo import StepMemo
from unicron_lib.agent.window import Window
from unicron_lib.domain import judging, recovery
from unicron_lib.domain.cluster import ClusterState, NodeStatus, PlanState
from unicron_lib.journal import Journal

CHUNK = 100
CAUGHT_WITHIN = 60
"""Storms; a planted bug that they do not find would be none that they look for."""


@cache
def play_all(first: int, number: int = CHUNK) -> list[storm.Weather]:
    return [storm.play(seed) for seed in range(first, first + number)]


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_a_thousand_storms_break_nothing(first: int) -> None:
    harm, events = Counter[str](), Counter[str]()
    for weather in play_all(first):
        harm += weather.harm
        events += weather.events
    assert set(harm) == set(storm.HARMS), "a hundred storms do all the harm there is"
    answers = {
        "PlanDecided",
        "StepCompleted",
        "RecoveryCompleted",
        "BreakerTripped",
        "JobResumed",
        "NodeReleased",
        "JobFinished",
    }
    assert answers <= set(events), "and call for all that production can answer"


@pytest.mark.storm
@pytest.mark.parametrize("first", range(1000, 11_000, 500))
def test_ten_thousand_storms_break_nothing(first: int) -> None:
    assert all(weather.entries for weather in play_all(first, 500))


def test_no_rank_outlives_its_generation() -> None:
    """It is fenced off the store, but it holds a GPU that the next job is launched on."""
    assert not [weather.left_behind for weather in play_all(0) if weather.left_behind]


def test_a_seed_is_a_run() -> None:
    """Also in another process, whose hashes are others: so a failing seed is all that anybody needs."""
    program = "import storm; print('\\n'.join(storm.play(3).story))"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    stories = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(stories) == 1
    assert "harm:" in stories.pop()


# planted bugs


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A node obeys replaced generations."""
    patch.setattr(Fence, "admits", lambda *_: True)


def no_memo(patch: pytest.MonkeyPatch) -> None:
    """A step that is asked for again is done again."""
    patch.setattr(StepMemo, "recall", lambda *_: None)


def no_ids(patch: pytest.MonkeyPatch) -> None:
    """The journal takes an event as often as it is told."""

    def accept(self: Journal, state: ClusterState, _: str) -> None:
        self._state = state

    patch.setattr(Journal, "_accept", accept)


def no_condition(patch: pytest.MonkeyPatch) -> None:
    """Of two writers of one entry both win."""
    put_if_absent = Store.put_if_absent

    def put(self: Store, key: str, data: bytes) -> bool:
        put_if_absent(self, key, data)
        return True

    patch.setattr(Store, "put_if_absent", put)


def no_resending(patch: pytest.MonkeyPatch) -> None:
    """What is sent is forgotten."""
    take = Window.take

    def forget(self: Window) -> tuple[object, ...]:
        taken = take(self)
        self._outbox.acknowledge(seen.seq for seen in taken)
        return taken

    patch.setattr(Window, "take", forget)


def no_escalation(patch: pytest.MonkeyPatch) -> None:
    """Restarts go on where they never help."""
    patch.setattr(judging, "_escalated", lambda root, _, told: (root.severity, told))


def no_supersession(patch: pytest.MonkeyPatch) -> None:
    """A plan that has been replaced goes on."""
    patch.setattr(PlanState, "is_active", property(lambda self: self.finished_at is None))


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The planner puts ranks on isolated nodes."""
    usable = {NodeStatus.READY, NodeStatus.QUARANTINED}
    healthy = property(lambda self: tuple(node for _, node in sorted(self.nodes.items()) if node.status in usable))
    patch.setattr(ClusterState, "healthy_nodes", healthy)


def no_inheritance(patch: pytest.MonkeyPatch) -> None:
    """Who replaces a plan forgets what that one was for."""

    def forgetful(plan: Callable[..., object]) -> Callable[..., object]:
        def wrapped(state: object, incidents: list, verdicts: dict, supersedes: str | None = None) -> object:
            kept = [it for it in incidents if it.id in verdicts] if supersedes else incidents
            return plan(state, kept, verdicts, supersedes)

        return wrapped

    patch.setattr(recovery, "_reallocate", forgetful(recovery._reallocate))
    patch.setattr(recovery, "_restart", forgetful(recovery._restart))


PLANTED = (
    *(no_fence, no_memo, no_ids, no_condition, no_resending, no_escalation, no_supersession, no_quarantine, no_inheritance),
)


def play_until_caught() -> None:
    for seed in range(CAUGHT_WITHIN):
        storm.play(seed)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(storm.StormBroken, match=r"storm \d+: ") as caught:
        play_until_caught()
    assert "journal 0:" in str(caught.value), "with its story"
