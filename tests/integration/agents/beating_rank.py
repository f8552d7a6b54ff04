"""A rank without torch that gives signs of life: iterations of 50 ms, the second half of each in a collective."""

import os
import time
from pathlib import Path

from fake_rank import Wire

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.detection.sections import Section

HALF_S = 0.025


def main() -> int:
    wire = Wire()
    wire.say("rank_hello", pid=os.getpid())
    beats = BeatWriter(Path(os.environ["UNICRON_BEAT_FILE"]))
    iteration = 0
    while True:
        beats.mark(Section.STEP)
        time.sleep(HALF_S)
        beats.mark(Section.COLLECTIVE)
        time.sleep(HALF_S)
        beats.complete(iteration, 2 * HALF_S)
        wire.progress(iteration)
        iteration += 1
