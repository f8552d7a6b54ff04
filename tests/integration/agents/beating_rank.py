"""A rank without torch that gives signs of life: iterations of 50 ms, the second half of each in a collective."""

import os
import threading
import time
from pathlib import Path

from fake_rank import Wire

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.detection.sections import Section

HALF_S = 0.025
WARM = 60
"""Iterations before the deadlock."""


def main() -> int:
    return iterate(float("inf"))


def deadlock() -> int:
    """Stop in its own part of an iteration, alive and asleep."""
    iterate(WARM)
    threading.Event().wait()
    return 1


def iterate(count: float) -> int:
    wire = Wire()
    wire.say("rank_hello", pid=os.getpid())
    beats = BeatWriter(Path(os.environ["UNICRON_BEAT_FILE"]))
    iteration = 0
    while iteration < count:
        beats.mark(Section.STEP)
        time.sleep(HALF_S)
        beats.mark(Section.COLLECTIVE)
        time.sleep(HALF_S)
        beats.complete(iteration, 2 * HALF_S)
        wire.progress(iteration)
        iteration += 1
    beats.mark(Section.STEP)
    return 0
