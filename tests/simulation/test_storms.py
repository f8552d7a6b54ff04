"""Storms on the production core: whatever comes together, invariants hold, and all is well once it is calm."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import storm
from storm_fleet import Fleet, Season
from storm_harms import HARMS
from storm_planted import PLANTED

CHUNK = 100
CAUGHT_WITHIN = 200
"""Storms; a planted bug that they do not find would be none that they look for."""
PATIENCE_S = 120.0
"""In virtual time, until one is caught for which it is never calm; the first two hundred storms are calm within 46 s."""
ANSWERS = frozenset(
    {
        *("PlanDecided", "StepCompleted", "RecoveryCompleted", "BreakerTripped", "JobResumed", "NodeReleased", "NodeSettled"),
        *("JobFinished", "JobCancelled", "RebalanceDue", "left as announced", "replica saved", "rank that lives on"),
        *("plan with rewind", "plan with stop", "plan with hold"),
    }
)
"""What production can answer with, and what is to be seen in a thousand storms."""


@pytest.fixture(scope="module")
def thousand() -> Iterator[Fleet]:
    fleet = Fleet(0, 1000, CHUNK)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def ten_thousand() -> Iterator[Fleet]:
    fleet = Fleet(1000, 11_000, CHUNK)
    yield fleet
    fleet.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_a_thousand_storms_break_nothing(first: int, thousand: Fleet) -> None:
    season = thousand.season(first)
    assert set(season.harm) == set(HARMS), "a hundred storms do all the harm there is"
    assert not season.left_behind, "a rank that outlives its generation holds a GPU that the next job is launched on"


def test_a_thousand_storms_call_for_all_that_production_can_answer(thousand: Fleet) -> None:
    seen = Counter[str]()
    for first in range(0, 1000, CHUNK):
        seen += thousand.season(first).seen
    assert set(seen) >= ANSWERS


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 11_000, CHUNK))
def test_ten_thousand_storms_break_nothing(first: int, ten_thousand: Fleet) -> None:
    season: Season = ten_thousand.season(first)
    assert season.number == CHUNK


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


def play_until_caught() -> None:
    for seed in range(CAUGHT_WITHIN):
        storm.play(seed)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "CALM_S", PATIENCE_S)
    plant(monkeypatch)
    with pytest.raises(storm.StormBroken, match=r"storm \d+: ") as caught:
        play_until_caught()
    assert "journal 0:" in str(caught.value), "with its story"
