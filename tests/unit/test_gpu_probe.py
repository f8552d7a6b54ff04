"""How the agent looks at its GPUs: through a probe that may fail, hang or never be there, and through injected faults."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from unicron_lib.agent import gpu_sight
from unicron_lib.agent.gpu_sight import Blindness, GpuSight
from unicron_lib.agent.messages import GpuFault, NodeNotice
from unicron_lib.agent.probe import GpuProbe
from unicron_lib.agent.probe_messages import Closed, Look, Opened
from unicron_lib.detection.gpu import GpuReading
from unicron_lib.errors import AgentError

DEADLINE_S = 10.0
FINE = GpuReading(index=3, uuid="GPU-3", name="H200", ecc_uncorrected_volatile=2)
LOST = GpuReading(index=3, uuid="GPU-3", name="H200", lost=True, error_code=15)
BLIND = Blindness(why="failing", reason="error 999")
HUNG = Blindness(why="hung", reason="no answer")
ABSENT = Blindness(why="no_driver", reason="no NVIDIA driver is installed")
View = tuple[GpuReading, ...] | Blindness | Exception


class FakeSight:
    """Shows `views` one after the other, then the last one for ever; an exception among them is raised."""

    def __init__(self, *views: View) -> None:
        self.views = views
        self.looks = 0
        self.closed = False
        self.looked = asyncio.Condition()

    async def look(self) -> tuple[GpuReading, ...] | Blindness:
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()
        view = self.views[min(self.looks, len(self.views)) - 1]
        if isinstance(view, Exception):
            raise view
        return view

    def hang(self, seconds: float) -> None:
        self.views = (*self.views, HUNG)

    async def close(self) -> None:
        self.closed = True

    async def shown(self) -> None:
        """All of them were looked at, and what they mean was told."""
        async with self.looked:
            await self.looked.wait_for(lambda: self.looks > len(self.views))


@dataclass
class Probing:
    probe: GpuProbe
    told: asyncio.Queue[GpuFault | NodeNotice] = field(default_factory=asyncio.Queue)

    def all(self) -> list[str]:
        """What was told: the kind of a fault and its GPU, the code of a notice with a minus if it is over."""
        return [_short(self.told.get_nowait()) for _ in range(self.told.qsize())]


def _short(news: GpuFault | NodeNotice) -> str:
    if isinstance(news, GpuFault):
        return f"{news.kind} {news.gpu}"
    return ("" if news.active else "-") + news.code


@asynccontextmanager
async def probing(sight: FakeSight, *, has_gpus: bool = False, num_gpus: int = 4) -> AsyncIterator[Probing]:
    told = asyncio.Queue[GpuFault | NodeNotice]()
    probe = GpuProbe(
        num_gpus=num_gpus,
        has_gpus=has_gpus,
        life=lambda: "b",
        jobs=lambda: ("a",),
        tell=told.put_nowait,
        sight=sight,
        look_s=0.001,
    )
    running = asyncio.create_task(probe.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Probing(probe, told)
        assert not running.done(), "nothing ends a probe"
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert sight.closed


class Lines(logging.Handler):
    """The lines of the log, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("unicron_lib.agent"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_fault_is_told_with_the_jobs_of_the_node() -> None:
    async with probing(FakeSight((FINE,), (LOST,))) as seen:
        fault = await seen.told.get()
    assert isinstance(fault, GpuFault)
    assert fault == GpuFault(kind="gpu_lost", gpu=3, uuid="GPU-3", evidence=fault.evidence, jobs=("a",))
    assert seen.all() == []


async def test_gpus_that_the_node_does_not_offer_are_not_its_business() -> None:
    offered = [replace(FINE, index=index, uuid=f"GPU-{index}") for index in range(4)]
    fifth = replace(LOST, index=4, uuid="GPU-4")
    sight = FakeSight((*offered, fifth), (*offered[:3], LOST, fifth))
    async with probing(sight, has_gpus=True) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_lost 3"]


async def test_a_node_that_offers_more_gpus_than_there_are_misses_one() -> None:
    sight = FakeSight(tuple(replace(FINE, index=index, uuid=f"GPU-{index}") for index in range(3)))
    async with probing(sight, has_gpus=True) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_lost 3"]


async def test_ranks_without_gpus_of_their_own_miss_none() -> None:
    sight = FakeSight((replace(FINE, index=0),))
    async with probing(sight, has_gpus=False) as seen:
        await sight.shown()
    assert seen.all() == []


async def test_a_gpu_that_is_gone_after_a_blind_while_is_missed() -> None:
    first = replace(FINE, index=0, uuid="GPU-0")
    sight = FakeSight((first, replace(FINE, index=1)), BLIND, (first,), (first,))
    async with probing(sight) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_blind", "gpu_lost 1", "-gpu_blind"]


async def test_an_exception_costs_one_look(lines: Lines) -> None:
    sight = FakeSight(RuntimeError("odd"), RuntimeError("odd"), (LOST,))
    async with probing(sight) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_lost 3"]
    assert sum("odd" in line for line in lines.all) == 1


async def test_a_driver_that_fails_for_a_while_is_one_notice_and_no_fault() -> None:
    """PB04: for a minute, every call answers 999; the trainers go on all the time."""
    sight = FakeSight((FINE,), *[BLIND] * 12, (FINE,), (FINE,), (FINE,))
    async with probing(sight) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_blind", "-gpu_blind"]


async def test_a_driver_that_hangs_is_one_notice_until_it_answers() -> None:
    """PB05."""
    sight = FakeSight((FINE,), *[HUNG] * 5, (FINE,), (FINE,))
    async with probing(sight) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_probe_hung", "-gpu_probe_hung"]


async def test_no_driver_is_said_once_and_is_nothing_to_tell(lines: Lines) -> None:
    sight = FakeSight(ABSENT, ABSENT, ABSENT)
    async with probing(sight) as seen:
        await sight.shown()
    assert lines.all == ["INFO GPU health is not watched on this node: no NVIDIA driver is installed"]
    assert seen.all() == []


async def test_a_node_with_gpus_misses_its_driver() -> None:
    sight = FakeSight(ABSENT)
    async with probing(sight, has_gpus=True) as seen:
        await sight.shown()
    assert seen.all() == ["gpu_blind"]


async def test_errors_of_a_single_gpu_are_logged_when_they_change(lines: Lines) -> None:
    failing = replace(FINE, error_code=10)
    sight = FakeSight((FINE,), (failing,), (failing,), (FINE,), (FINE,))
    async with probing(sight) as seen:
        await sight.shown()
    assert lines.all == ["WARNING GPU 3 answers with NVML error 10", "INFO every GPU answers"]
    assert seen.all() == []


@pytest.mark.parametrize("view", [ABSENT, BLIND, (replace(FINE, index=1, nvlinks_up=(0, 1)),), (replace(LOST, index=0),)])
@pytest.mark.parametrize(("kind", "found"), [("ecc", "ecc_error 1"), ("nvlink", "nvlink_error 1"), ("gpu-lost", "gpu_lost 1")])
async def test_an_injected_fault_is_found_once_with_and_without_a_driver(view: View, kind: str, found: str) -> None:
    sight = FakeSight(view)
    async with probing(sight) as seen:
        await sight.shown()
        before = seen.all()
        seen.probe.inject(kind, 1)
        assert _short(await seen.told.get()) == found
        looks = sight.looks
        async with sight.looked:
            await sight.looked.wait_for(lambda: sight.looks > looks + 2)
    assert seen.all() == []
    assert found not in before


async def test_two_faults_can_be_injected_into_one_gpu() -> None:
    sight = FakeSight(ABSENT)
    async with probing(sight) as seen:
        seen.probe.inject("ecc", 0)
        assert _short(await seen.told.get()) == "ecc_error 0"
        seen.probe.inject("nvlink", 0)
        assert _short(await seen.told.get()) == "nvlink_error 0"


async def test_a_fault_cannot_be_injected_into_a_gpu_that_is_not_there() -> None:
    sight = FakeSight(ABSENT)
    async with probing(sight) as seen:
        await sight.shown()
        with pytest.raises(AgentError, match="no GPU 4 on this node, it offers 4"):
            seen.probe.inject("ecc", 4)


HANGS = object()
DIES = object()


class FakeLife:
    """A probe process whose looks end as `answers` say; one that hangs ends only when it is `let_go`."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.opened: Opened | None = None
        self.killed = False
        self.is_gone = False
        self.buried = False

    async def look(self, *, deadline_s: float) -> Look | Closed | None:
        answer = self.answers.pop(0)
        if answer is HANGS:
            async with asyncio.timeout(deadline_s):
                await asyncio.Event().wait()
        if answer is DIES:
            self.is_gone = True
            return None
        if isinstance(answer, Look):
            self.opened = Opened(driver="580", off=("no recovery actions",))
        assert isinstance(answer, Look | Closed)
        return answer

    def kill(self) -> None:
        self.killed = True

    async def bury(self) -> None:
        self.buried = True


GOOD = Look(gpus=(FINE,))


def sight_of(*lives: FakeLife, find: Callable[[], bool] = lambda: True) -> GpuSight:
    left = iter(lives)
    return GpuSight(on_xid=lambda *_: None, deadline_s=0.001, backoff_s=0.0, find=find, start=lambda _: next(left))


async def test_one_process_is_asked_again_and_again(lines: Lines) -> None:
    sight = sight_of(FakeLife(GOOD, GOOD, GOOD))
    assert [await sight.look() for _ in range(3)] == [(FINE,)] * 3
    assert lines.all == ["INFO watching the health of 1 GPUs, driver 580", "INFO no recovery actions"]


async def test_never_two_processes_are_stuck() -> None:
    """PB05: SIGKILL does not end a process that is stuck in the driver; its successor has to wait for that."""
    stuck = FakeLife(GOOD, HANGS)
    sight = sight_of(stuck, FakeLife(GOOD))
    assert await sight.look() == (FINE,)
    for _ in range(5):
        view = await sight.look()
        assert isinstance(view, Blindness)
        assert view.why == "hung"
    assert stuck.killed
    assert not stuck.buried
    stuck.is_gone = True
    assert await sight.look() == (FINE,)
    assert stuck.buried


async def test_a_process_that_dies_is_replaced() -> None:
    sight = sight_of(FakeLife(GOOD, DIES), FakeLife(GOOD))
    views = [await sight.look() for _ in range(3)]
    assert views == [(FINE,), Blindness(why="failing", reason="the process that asks the NVIDIA driver has died"), (FINE,)]


async def test_a_process_that_gives_up_tells_why() -> None:
    quits = FakeLife(Closed(reason="error 999", no_driver=False))
    sight = sight_of(quits, FakeLife(GOOD))
    assert await sight.look() == BLIND
    quits.is_gone = True
    assert await sight.look() == (FINE,)


async def test_trouble_that_lasts_is_asked_about_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    lives = [FakeLife(DIES) for _ in range(20)]
    left = iter(lives)
    sight = GpuSight(on_xid=lambda *_: None, find=lambda: True, start=lambda _: next(left))
    begun = []
    for second in range(300):
        now = float(second)
        before = sum(not life.answers for life in lives)
        await sight.look()
        begun += [second] if sum(not life.answers for life in lives) > before else []
    assert begun == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]


async def test_without_the_library_no_process_is_started() -> None:
    asked = []
    sight = sight_of(find=lambda: bool(asked.append(1)))
    views = [await sight.look() for _ in range(3)]
    assert {view.why for view in views if isinstance(view, Blindness)} == {"no_driver"}
    assert asked == [1], "it is not looked for at every look"


async def test_a_driver_that_comes_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sight, "RETRY_S", 0.0)
    found = iter([False, True])
    sight = sight_of(FakeLife(GOOD), find=lambda: next(found))
    assert [await sight.look() for _ in range(2)][1] == (FINE,)


@pytest.mark.parametrize(
    ("gpu", "idle"),
    [
        (GpuReading(index=3, seen_at=51.0, utilization_ratio=0.0), [3]),
        (GpuReading(index=3, seen_at=51.0, utilization_ratio=0.01), []),
        (GpuReading(index=3, seen_at=51.0, utilization_ratio=None), []),
        (GpuReading(index=3, seen_at=51.0, utilization_ratio=0.0, mig=True), []),
        (GpuReading(index=3, seen_at=49.0, utilization_ratio=0.0), []),
    ],
)
async def test_only_a_gpu_that_was_seen_without_work_is_idle(gpu: GpuReading, idle: list[int]) -> None:
    """PB03: what is not known says nothing."""
    sight = FakeSight((gpu,))
    async with probing(sight, has_gpus=True) as seen:
        await sight.shown()
        assert [index for index in (3,) if seen.probe.is_idle(index, 50.0)] == idle
        assert not seen.probe.is_idle(2, 50.0), "nobody has seen it"


async def test_where_there_is_no_gpu_none_works() -> None:
    sight = FakeSight(ABSENT)
    async with probing(sight) as seen:
        await sight.shown()
        assert seen.probe.is_idle(0, 50.0)
