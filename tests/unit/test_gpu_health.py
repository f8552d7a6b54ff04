"""When a GPU counts as broken, and how the agent looks at drivers that fail, hang or are not there."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from unicron_lib.adapters.nvml import NvmlAbsent
from unicron_lib.agent.messages import GpuFault
from unicron_lib.agent.probe import GpuDriver, GpuProbe
from unicron_lib.detection.gpu import GpuReading, GpuWatch, judge

DEADLINE_S = 10.0
FINE = GpuReading(index=3, uuid="GPU-3", name="H200", ecc_uncorrected_volatile=2, row_remap_failure=False)
LOST = GpuReading(index=3, uuid="GPU-3", name="H200", lost=True, error_code=15)


def ecc(count: int | None) -> GpuReading:
    return replace(FINE, ecc_uncorrected_volatile=count)


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (None, FINE, None),
        (FINE, FINE, None),
        (FINE, ecc(3), "ecc_error"),
        (FINE, ecc(0), None),
        (FINE, ecc(None), None),
        (ecc(None), ecc(3), None),
        (None, ecc(3), None),
        (FINE, LOST, "gpu_lost"),
        (None, LOST, "gpu_lost"),
        (FINE, replace(FINE, row_remap_failure=True), "ecc_error"),
        (None, replace(FINE, row_remap_failure=True), "ecc_error"),
        (FINE, replace(FINE, row_remap_failure=None, row_remap_pending=True), None),
        (FINE, GpuReading(index=3, uuid="GPU-3", error_code=999), None),
    ],
)
def test_judgement(before: GpuReading | None, now: GpuReading, kind: str | None) -> None:
    found = judge(before, now)
    assert (found and found.kind) == kind
    if found:
        assert (found.gpu, found.uuid) == (3, "GPU-3")
        assert found.evidence.startswith("GPU 3 (H200, GPU-3) ")


def test_a_gpu_that_never_told_its_uuid_is_found_as_well() -> None:
    found = judge(None, GpuReading(index=0, lost=True, error_code=15))
    assert found is not None
    assert (found.uuid, found.evidence) == (
        "",
        "GPU 0 (its UUID was never told) is lost, it no longer answers the driver (NVML error 15)",
    )


def kinds(watch: GpuWatch, *looks: GpuReading, life: str = "b") -> list[list[str]]:
    return [[found.kind for found in watch.news([look], life=life)] for look in looks]


def test_each_gpu_and_kind_is_told_once() -> None:
    """PB01: one GPU is lost from the fifth look on; 16 looks later that is still one event, of that GPU."""
    watch = GpuWatch()
    others = [GpuReading(index=index, uuid=f"GPU-{index}") for index in range(8) if index != 3]
    looks = [watch.news([*others, FINE if look < 5 else LOST], life="b") for look in range(20)]
    assert [(found.gpu, found.kind) for look in looks for found in look] == [(3, "gpu_lost")]
    assert looks[5]


def test_another_kind_of_the_same_gpu_is_news() -> None:
    looks = kinds(GpuWatch(), FINE, ecc(3), ecc(4), LOST, ecc(4), LOST)
    assert looks == [[], ["ecc_error"], [], ["gpu_lost"], [], []]


def test_a_count_that_could_not_be_read_once_is_compared_with_the_one_before() -> None:
    assert kinds(GpuWatch(), FINE, ecc(None), LOST, ecc(3)) == [[], [], ["gpu_lost"], ["ecc_error"]]


def test_a_driver_that_is_loaded_anew_counts_from_0() -> None:
    assert kinds(GpuWatch(), FINE, ecc(0), ecc(1)) == [[], [], ["ecc_error"]]


def test_a_replaced_gpu_begins_anew() -> None:
    assert kinds(GpuWatch(), FINE, replace(ecc(7), uuid="GPU-other")) == [[], []]


def test_a_new_life_tells_again_what_is_still_wrong() -> None:
    watch = GpuWatch()
    assert kinds(watch, FINE, ecc(3), LOST, ecc(3)) == [[], ["ecc_error"], ["gpu_lost"], []]
    assert kinds(watch, ecc(3), ecc(3), life="c") == [["ecc_error"], []]


class FakeDriver:
    """Answers with `looks` one after the other, then with the last one for ever; an exception among them is raised."""

    def __init__(self, *looks: Sequence[GpuReading] | Exception) -> None:
        self.looks = list(looks)
        self.calls = 0
        self.threads = 0
        self.go = threading.Event()
        self.go.set()

    def read(self) -> Sequence[GpuReading]:
        self.threads += 1
        assert self.go.wait(DEADLINE_S), "nobody let this call go"
        self.threads -= 1
        look = self.looks[min(self.calls, len(self.looks) - 1)]
        self.calls += 1
        if isinstance(look, Exception):
            raise look
        return look


@asynccontextmanager
async def probing(
    open_driver: Callable[[], GpuDriver | NvmlAbsent], *, deadline_s: float = DEADLINE_S
) -> AsyncIterator[asyncio.Queue[GpuFault]]:
    told = asyncio.Queue[GpuFault]()
    probe = GpuProbe(
        num_gpus=4,
        life=lambda: "b",
        jobs=lambda: ("a",),
        tell=told.put_nowait,
        open_driver=open_driver,
        look_s=0.001,
        deadline_s=deadline_s,
    )
    running = asyncio.create_task(probe.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield told
        assert not running.done(), "nothing ends a probe"
    finally:
        running.cancel()
        await asyncio.wait([running])


class Lines(logging.Handler):
    """The lines of the log, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.queue = asyncio.Queue[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(f"{record.levelname} {record.getMessage()}")
        self.queue.put_nowait(self.all[-1])


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("unicron_lib.agent.probe"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_fault_is_told_with_the_jobs_of_the_node(lines: Lines) -> None:
    driver = FakeDriver([FINE], [LOST])
    async with probing(lambda: driver) as told:
        fault = await told.get()
    assert fault == GpuFault(kind="gpu_lost", gpu=3, uuid="GPU-3", evidence=fault.evidence, jobs=("a",))
    assert lines.all[0] == "INFO watching the health of 1 GPUs"
    assert told.empty()


async def test_gpus_that_the_node_does_not_offer_are_not_its_business() -> None:
    offered = [replace(FINE, index=index) for index in range(4)]
    driver = FakeDriver([*offered, replace(LOST, index=4)], [*offered[:3], LOST, replace(LOST, index=4)])
    async with probing(lambda: driver) as told:
        assert (await told.get()).gpu == 3
    assert told.empty()


async def test_a_driver_that_hangs_blocks_nobody_and_costs_one_thread(lines: Lines) -> None:
    driver = FakeDriver([LOST])
    driver.go.clear()
    async with probing(lambda: driver, deadline_s=0.001) as told:
        while "has not answered" not in await lines.queue.get():
            pass
        assert (driver.threads, driver.calls, told.empty()) == (1, 0, True)
        driver.go.set()
        assert (await told.get()).kind == "gpu_lost"
        while "watching" not in await lines.queue.get():
            pass


async def test_a_probe_can_be_stopped_while_its_driver_hangs(lines: Lines) -> None:
    driver = FakeDriver([LOST])
    driver.go.clear()
    async with probing(lambda: driver, deadline_s=0.001) as told:
        await lines.queue.get()
    assert driver.threads == 1, "it still hangs"
    driver.go.set()
    assert told.empty()


async def test_an_exception_costs_one_look(lines: Lines) -> None:
    driver = FakeDriver(RuntimeError("odd"), RuntimeError("odd"), [LOST])
    async with probing(lambda: driver) as told:
        assert (await told.get()).kind == "gpu_lost"
    assert driver.calls >= 3
    assert sum("odd" in line for line in lines.all) == 1


async def test_errors_that_are_no_evidence_are_logged_when_they_change(lines: Lines) -> None:
    """PB04: for a while, every call fails, and nothing is wrong with the GPU."""
    blind = GpuReading(index=3, uuid="GPU-3", error_code=999)
    driver = FakeDriver([FINE], [blind], [blind], [FINE], [LOST])
    async with probing(lambda: driver) as told:
        assert (await told.get()).kind == "gpu_lost"
    assert [line.split(" ", 1)[0] for line in lines.all[:4]] == ["INFO", "WARNING", "INFO", "WARNING"]
    assert lines.all[1] == "WARNING watching the health of 1 GPUs: GPU 3 answers with NVML error 999"
    assert told.empty()


async def test_no_driver_is_said_once(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lib.agent.probe.RETRY_S", 0.001)
    asked = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def absent() -> NvmlAbsent:
        loop.call_soon_threadsafe(asked.release)
        return NvmlAbsent(reason="no NVIDIA driver is installed", code=12)

    async with probing(absent) as told:
        for _ in range(3):
            await asked.acquire()
    assert lines.all == ["INFO GPU health is not watched on this node: no NVIDIA driver is installed"]
    assert told.empty()


async def test_a_driver_that_comes_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lib.agent.probe.RETRY_S", 0.001)
    answers = [NvmlAbsent(reason="not loaded", code=9), FakeDriver([LOST])]
    async with probing(lambda: answers.pop(0)) as told:
        assert (await told.get()).kind == "gpu_lost"
    assert answers == []
