"""The train flow journals who slows its job down."""

import asyncio
import logging
import math
from dataclasses import replace

import pytest

from flows import training
from unicron_lib.controller.views import JobProgress
from unicron_lib.detection.windows import WINDOW, Window
from unicron_lib.domain.events import StragglerCleared, StragglerDetected


def progress(number, slow):
    excess = {0: 0.0, 1: math.log(slow), 2: 0.0}
    window = Window(
        first=number * WINDOW,
        iteration_s=1.0,
        iteration_spread=0.01,
        spread=0.01,
        excess=excess,
        compute_s={rank: math.exp(value) for rank, value in excess.items()},
    )
    return JobProgress(
        job="gpt-a",
        generation=1,
        world_size=3,
        iteration=number * WINDOW,
        loss=1.0,
        iteration_s=1.0,
        flops=1.0,
        at=1.0,
        first_iteration_at=1.0,
        iterations={0: 1, 1: 1, 2: 1},
        measured_flops={},
        window=window,
        nodes={0: "node-1", 1: "node-2", 2: "node-2"},
    )


@pytest.fixture
def watched(site, monkeypatch):
    """Each look of the flow sees the next of the windows, the last one again and again."""
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("flow"))

    async def watch(windows, done):
        left, answered = list(windows), []

        async def live():
            answered.append(left.pop(0) if len(left) > 1 else left[0])
            return (answered[-1],)

        monkeypatch.setattr(training.services().controller, "progress", live, raising=False)
        for_ever = training._for_ever
        monkeypatch.setattr(training, "_for_ever", lambda look, pause_s: for_ever(look, 0.0))
        watching = asyncio.create_task(training._watch_stragglers("gpt-a"))
        try:
            async with asyncio.timeout(20):
                while not done(site) or len(left) > 1:  # noqa: ASYNC110 - a journal rings no bell
                    await asyncio.sleep(0.01)
        finally:
            watching.cancel()
        return [entry.event for entry in site.journal.entries()]

    return watch


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def has(kind):
    return lambda site: bool(of(kind, [entry.event for entry in site.journal.entries()]))


async def test_a_straggler_and_its_end_are_journalled_once(watched):
    windows = [progress(number, 1.0) for number in range(3)]
    windows += [progress(number, 1.5) for number in range(3, 8)]
    windows += [progress(number, 1.0) for number in range(8, 12)]
    events = await watched(windows, has(StragglerCleared))
    (slow,) = of(StragglerDetected, events)
    assert (slow.rank, slow.node, slow.generation) == (1, "node-2", 1)
    assert slow.ratio == pytest.approx(1.5, rel=0.3)
    (cleared,) = of(StragglerCleared, events)
    assert (cleared.rank, cleared.generation) == (1, 1)


async def test_a_new_run_of_the_flow_knows_what_its_predecessor_has_told(watched):
    slow = [progress(number, 1.5) for number in range(8)]
    assert len(of(StragglerDetected, await watched(slow, has(StragglerDetected)))) == 1
    again = [progress(number, 1.5) for number in range(8, 12)] + [progress(number, 1.0) for number in range(12, 18)]
    events = await watched(again, has(StragglerCleared))
    assert len(of(StragglerDetected, events)) == 1


async def test_a_job_without_a_window_yet_is_left_alone(watched):
    events = await watched([replace(progress(0, 1.0), window=None)], lambda _: True)
    assert of(StragglerDetected, events) == []
