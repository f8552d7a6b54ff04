"""The probe process on a stand-in for NVIDIA's library: it may hang, be killed, or see a fault; the agent's side copes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from stand_in_driver import CURRENT, build, no_driver, write, xid

from unicron_lib.agent.gpu_sight import Blindness, GpuSight
from unicron_lib.agent.probe_life import COMMAND

DEADLINE_S = 60.0
HUNG_S = 1.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in library of a current driver."""
    return build(tmp_path_factory.mktemp("driver"), *CURRENT)


@pytest.fixture
def state(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the state of the GPUs, for every process that is started from now on."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(tmp_path / "gpus"))
    write(tmp_path / "gpus", "")
    return tmp_path / "gpus"


class Seeing:
    """A sight on real processes, and the Xids that it was told of."""

    def __init__(self) -> None:
        self.xids = asyncio.Queue[tuple[int, str, int]]()
        self.sight = GpuSight(
            on_xid=lambda *event: self.xids.put_nowait(event), deadline_s=HUNG_S, backoff_s=0.0, find=lambda: True
        )

    async def look(self) -> str:
        """What is seen: `fine`, or why nothing is."""
        view = await self.sight.look()
        return view.why if isinstance(view, Blindness) else "fine"

    async def until(self, wanted: str) -> None:
        """Look until that is seen; a busy machine may need longer for the first answers than the deadline is."""
        while True:
            if await self.look() == wanted:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def seeing() -> AsyncIterator[Seeing]:
    seen = Seeing()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield seen
    finally:
        await seen.sight.close()
    assert probes() == []


def probes() -> list[psutil.Process]:
    """The probe processes of this test that have not ended."""
    children = psutil.Process().children(recursive=True)
    return [
        child for child in children if child.status() != psutil.STATUS_ZOMBIE and "probe_process" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("where", ["init.hang 1\n", "gpu1.hang.temperature 1\n"], ids=["at init", "at a metric"])
async def test_a_call_that_never_returns_costs_one_process(state: Path, where: str) -> None:
    """PB05: the hang is known within the deadline, there is one process at most, and it is over when the driver answers."""
    write(state, where)
    async with seeing() as seen:
        for _ in range(3):
            assert await seen.look() == "hung"
            assert len(probes()) <= 1
        write(state, "")
        await seen.until("fine")
        assert len(probes()) == 1


async def test_a_driver_can_be_made_to_hang_for_a_while(state: Path) -> None:
    """PB05, as a drill on a driver that is well."""
    async with seeing() as seen:
        await seen.until("fine")
        seen.sight.hang(1.5 * HUNG_S)
        for _ in range(2):
            assert await seen.look() == "hung"
            assert len(probes()) <= 1
        await seen.until("fine")
        assert len(probes()) == 1


async def test_a_probe_that_is_killed_is_replaced(state: Path) -> None:
    async with seeing() as seen:
        await seen.until("fine")
        (probe,) = probes()
        probe.kill()
        assert await seen.look() == "failing"
        await seen.until("fine")


async def test_an_xid_is_told_without_being_asked_for(state: Path) -> None:
    """Between two looks, and for the GPU that it came from."""
    async with seeing() as seen:
        await seen.until("fine")
        xid(state, 1, 79)
        assert await seen.xids.get() == (1, "GPU-00000001", 79)
        xid(state, 0, 45)
        assert await seen.xids.get() == (0, "GPU-00000000", 45)
        assert await seen.look() == "fine"
        assert seen.xids.empty()


async def test_xids_go_on_while_a_metric_hangs(state: Path) -> None:
    async with seeing() as seen:
        await seen.until("fine")
        write(state, "gpu0.hang 1\n")
        looking = asyncio.create_task(seen.look())
        xid(state, 1, 79)
        assert await seen.xids.get() == (1, "GPU-00000001", 79)
        assert await looking == "hung"


async def test_a_driver_that_answers_nothing_is_asked_by_a_new_process(state: Path) -> None:
    """PB04: with 999 for every call, or for the next initialisation, nothing is known; then it is again."""
    async with seeing() as seen:
        await seen.until("fine")
        write(state, "err 999\ninit 999\n")
        for _ in range(3):
            assert await seen.look() == "failing"
        write(state, "")
        await seen.until("fine")


async def test_without_a_library_the_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(no_driver(tmp_path)))
    async with seeing() as seen:
        assert await seen.look() == "no_driver"


def test_an_old_driver_without_events_is_looked_at_all_the_same(tmp_path: Path) -> None:
    env = os.environ | {"LD_LIBRARY_PATH": str(build(tmp_path))}
    done = subprocess.run(COMMAND, env=env, input="\n", capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    _, opened, look = done.stdout.splitlines()
    assert "Xid events do not come from NVML (error 13" in opened
    assert "GPU-00000001" in look


PARENT = """
import subprocess, sys, time
from unicron_lib.agent.probe_life import COMMAND
probe = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(probe.pid, probe.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


def test_a_stuck_probe_dies_with_its_parent(state: Path) -> None:
    """Even if it cannot read that its input has ended."""
    write(state, "init.hang 1\n")
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        probe = psutil.Process(int(parent.stdout.readline().split()[0]))
        assert probe.is_running()
        parent.send_signal(signal.SIGKILL)
    gone, _ = psutil.wait_procs([probe], timeout=DEADLINE_S)
    assert gone == [probe]
