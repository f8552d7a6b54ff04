"""For how long has a process done nothing: what is made of looks at it, and what the kernel shows of real ones."""

import os
import signal
import subprocess
import sys
import time

import pytest

from unicron_lib.agent.glimpses import glimpse
from unicron_lib.detection.stillness import TICKS_S, Glimpse, Stillness

PATIENCE_S = 30.0


def after(*looks):
    """Since when nothing has been done, after looks a second apart at these processor times; None: it runs."""
    stillness = Stillness()
    for number, cpu_s in enumerate(looks):
        stillness.look(Glimpse(is_asleep=cpu_s is not None, cpu_s=cpu_s or 0.0), float(number))
    return stillness.since


@pytest.mark.parametrize(
    ("looks", "since"),
    [
        ((), None),
        ((5.0,), 0.0),
        ((5.0, 5.0, 5.0), 0.0),
        ((5.0, 5.0 + TICKS_S, 5.0 + 2 * TICKS_S), 0.0),
        ((5.0, 5.2, 5.2), 1.0),
        ((5.0, 5.1, 5.2, 5.3), 3.0),
        ((5.0, None), None),
        ((5.0, None, 5.0, 5.0), 2.0),
        ((5.0, 3.0, 3.0), 1.0),
    ],
)
def test_since_when_nothing_has_been_done(looks, since):
    """A bit of processor time is used by whoever sleeps; less than before: a child has ended."""
    assert after(*looks) == since


def test_what_cannot_be_seen_is_not_known_to_be_still():
    stillness = Stillness()
    stillness.look(Glimpse(is_asleep=True, cpu_s=1.0), 0.0)
    stillness.look(None, 1.0)
    assert stillness.since is None


SLEEPS, WORKS = "import time; print(flush=True); time.sleep(600)", "print(flush=True)\nwhile True: pass"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
THREAD = "import threading; threading.Thread(target=exec, args=('while True: pass',), daemon=True).start();" + SLEEPS


@pytest.fixture
def run():
    """Start Python with a program, and wait for its first line."""
    started = []

    def start(*arguments):
        process = subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def still_s(pid, enough_s):
    """For how long it is seen to be still, looked at for `enough_s` or more if it never is."""
    stillness, began = Stillness(), time.monotonic()
    while (now := time.monotonic()) < began + PATIENCE_S:
        stillness.look(glimpse(pid), now)
        if stillness.since is not None and now - stillness.since > enough_s:
            return now - stillness.since
        if stillness.since is None and now > began + enough_s:
            return 0.0
        time.sleep(0.02)  # looks at a real process
    raise AssertionError(f"{pid} is never seen to be still, nor to work")


@pytest.mark.parametrize("program", [(SLEEPS,), (PARENT, SLEEPS)])
def test_who_sleeps_stands_still_and_so_do_its_children(run, program):
    assert still_s(run(*program).pid, 0.3) > 0.3


@pytest.mark.parametrize("program", [(WORKS,), (PARENT, WORKS), (THREAD,)])
def test_who_works_itself_in_a_thread_or_in_a_child_does_not(run, program):
    assert still_s(run(*program).pid, 0.5) == 0.0


def test_who_is_stopped_in_the_middle_of_its_work_does(run):
    process = run(WORKS)
    process.send_signal(signal.SIGSTOP)
    assert still_s(process.pid, 0.3) > 0.3


def test_a_process_that_is_gone_shows_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert glimpse(process.pid) is None
