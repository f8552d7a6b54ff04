"""A user's script without torch; does what its first argument says."""

import os
import signal
import sys
import time
from pathlib import Path

from unicron_lib.training.session import session

STEP_S = 0.02
LEARNED = 100
"""Steps after which the agent knows the script's pace: it looks ten times a second."""


def steps(run):
    step = 0
    while not run.should_stop:
        time.sleep(STEP_S)
        run.step(step, loss=1.0)
        step += 1
    Path(f"saved-{os.environ['RANK']}").write_text(str(step))


def with_session(_):
    with session() as run:
        steps(run)


def raises(_):
    with session() as run:
        run.step(0)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raises_alone(_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hangs(_):
    with session() as run:
        for step in range(LEARNED):
            time.sleep(STEP_S)
            run.step(step)
        signal.pause()


def saves_for_long(_):
    with session() as run:
        for step in range(LEARNED):
            time.sleep(STEP_S)
            run.step(step)
        with run.section("checkpoint"):
            Path(f"saving-{os.environ['RANK']}").touch()
            time.sleep(2.5)
        steps(run)


def mute(_):
    signal.pause()


def handles_sigterm(_):
    def save(*_):
        Path(f"saved-{os.environ['RANK']}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    Path(f"ready-{os.environ['RANK']}").touch()
    while True:
        signal.pause()


def finishes(_):
    sys.stdout.write(f"done {Path.cwd()} {os.environ['LEVEL']}\n")


def finishes_late(_):
    if os.environ["RANK"] == "1":
        signal.pause()


globals()[sys.argv[1]](None)
