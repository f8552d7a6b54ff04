"""The warm recovery service: what it starts, what it leaves to what runs already, and that it never waits for Prefect."""

import asyncio
import contextlib
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from scenes import TABLE

from flows import response, service
from flows.service import RecoveryService
from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.events import FailureDetected, JobSubmitted
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import StoreError

DEADLINE_S = 20.0


@pytest.fixture
async def two_jobs(site, monkeypatch):
    """The site with a job on each node, and a service of which Prefect is away."""
    monkeypatch.setattr(service, "services", response.services)
    monkeypatch.setattr(service, "decide", response.decide)  # the eager one
    monkeypatch.setattr(service, "POLL_S", 0.05)

    async def idle() -> None:
        await asyncio.Event().wait()

    async def no_run(_self, _incident, _attempt) -> None:
        return None

    checks = ("keep_checked", "keep_launches_checked")
    for name in ("keep_watched", "keep_buried", "keep_foreseeing", "keep_rebalancing", "keep_diagnosed", *checks):
        monkeypatch.setattr(service, name, idle)
    for name in ("_listen", "_adopt_orphans", "_record_late"):
        monkeypatch.setattr(RecoveryService, name, lambda _: idle())
    monkeypatch.setattr(RecoveryService, "_new_run", no_run)
    spec = JobSpec(job="gpt-b", min_gpus=2, throughput_flops=TABLE)
    site.journal.append(JobSubmitted(id="s2", at=1.0, submission="2", spec=spec))
    await site.respond()
    assert {name: job.gpus for name, job in site.journal.state.jobs.items()} == {"gpt-a": 2, "gpt-b": 2}
    return site


@contextlib.asynccontextmanager
async def serving():
    serves = asyncio.create_task(RecoveryService().serve())
    try:
        yield serves
        assert not serves.done(), "the service ended"
    finally:
        serves.cancel()
        await asyncio.gather(serves, return_exceptions=True)


def fail(site, name: str, job: str) -> None:
    generation = site.journal.refresh().jobs[job].generation
    failure = Failure(
        id=name,
        kind=ErrorKind.PROCESS_EXIT,
        method=DetectionMethod.PROCESS,
        seen_at=1.0,
        job=job,
        generation=generation,
        rank=0,
        iteration=7 + generation,
    )
    site.journal.append(FailureDetected(id=name, at=1.0, failure=failure))


async def closed(site, number: int) -> None:
    """Until so many failures are answered."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            done = [i for i in site.journal.refresh().incidents.values() if i.is_failure and i.status is IncidentStatus.CLOSED]
            if len(done) >= number:
                return
            await asyncio.sleep(0.01)  # nobody announces what is written to a directory


class Shelf:
    """Where the report of a recovery is written: the first one takes until it is let go."""

    def __init__(self) -> None:
        self.first, self.second, self.let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def report(self, _state, _progress) -> None:
        if not self.first.is_set():
            self.first.set()
            await self.let_go.wait()
        else:
            self.second.set()


async def test_a_failure_is_answered_while_another_recovery_is_still_being_written_up(two_jobs, monkeypatch) -> None:
    shelf = Shelf()
    monkeypatch.setattr(response, "report_recovery", shelf.report)
    async with serving():
        fail(two_jobs, "f1", "gpt-a")
        async with asyncio.timeout(DEADLINE_S):
            await shelf.first.wait()
        fail(two_jobs, "f2", "gpt-b")
        await closed(two_jobs, 2)
        assert not shelf.let_go.is_set(), "the first report is not written yet"
        async with asyncio.timeout(DEADLINE_S):
            await shelf.second.wait()
        shelf.let_go.set()


async def test_each_incident_has_one_answer_however_often_the_service_looks(two_jobs, monkeypatch) -> None:
    answers: list[str] = []
    answer = service.respond

    async def counted(call, *, incident):
        answers.append(incident)
        await answer(call, incident=incident)

    monkeypatch.setattr(service, "respond", counted)
    monkeypatch.setattr(service, "POLL_S", 0.001)
    async with serving():
        for number, job in enumerate(("gpt-a", "gpt-b", "gpt-a"), start=1):
            fail(two_jobs, f"f{number}", job)
            await closed(two_jobs, number)
    assert len(answers) == len(set(answers)) == 3


async def test_the_controller_s_word_wakes_it(two_jobs, monkeypatch) -> None:
    looked, news, look = asyncio.Event(), asyncio.Event(), RecoveryService._look

    async def noted(recovery) -> float:
        pause_s = await look(recovery)
        looked.set()
        return pause_s

    async def acknowledged(_self, told=-1, *, wait_s=0.0) -> int:
        await news.wait()
        news.clear()
        return told + 1

    monkeypatch.setattr(RecoveryService, "_look", noted)
    monkeypatch.setattr("fake_site.FakeController.acknowledged", acknowledged)
    monkeypatch.setattr(service, "POLL_S", 10 * DEADLINE_S)
    async with serving():
        async with asyncio.timeout(DEADLINE_S):
            await looked.wait()
        fail(two_jobs, "f1", "gpt-a")
        news.set()
        await closed(two_jobs, 1)


async def test_an_answer_that_breaks_off_is_taken_up_again(two_jobs, monkeypatch) -> None:
    answer, attempts = service.respond, []

    async def breaks_twice(call, *, incident):
        attempts.append(incident)
        if len(attempts) < 3:
            raise StoreError("the store is away for a moment")
        await answer(call, incident=incident)

    monkeypatch.setattr(service, "respond", breaks_twice)
    async with serving():
        fail(two_jobs, "f1", "gpt-a")
        await closed(two_jobs, 1)
    assert len(attempts) == 3


async def test_it_ends_at_once_with_an_answer_under_way(two_jobs, monkeypatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never_ends(_call, *, incident):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(service, "respond", never_ends)
    async with serving():
        fail(two_jobs, "f1", "gpt-a")
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
    assert ended.is_set()


def test_an_automation_that_could_not_act_is_logged(caplog) -> None:
    """PB46: the only trace of it is an event."""
    failed = SimpleNamespace(
        event=service.ACTION_FAILED,
        resource=SimpleNamespace(name="recover", id="prefect.automation.1"),
        payload={"reason": "Unable to create flow run from deployment: InvalidJinja()"},
    )
    RecoveryService()._hear(failed)
    assert "automation recover could not act: Unable to create flow run" in caplog.text


@pytest.mark.parametrize(("codes", "asked"), [([503, 503], 3), ([503] * 9, 5), ([404], 1)])
async def test_a_server_that_is_busy_is_asked_again_for_a_moment(monkeypatch, codes, asked):
    monkeypatch.setattr(service, "BUSY_S", (0.0,) * 4)
    calls = 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        if len(codes) < calls:
            return "done"
        request = httpx.Request("POST", "http://server")
        raise PrefectHTTPStatusError("no", request=request, response=httpx.Response(codes[calls - 1], request=request))

    with contextlib.suppress(PrefectHTTPStatusError):
        assert await service.unless_busy(call) == "done"
        assert codes == [503, 503]
    assert calls == asked


@pytest.mark.parametrize("turns", range(8))
async def test_an_end_that_coincides_with_news_is_no_less_an_end(two_jobs, turns):
    """SIGTERM, in whichever turn of the event loop it comes after an event has woken the service."""
    recovery = RecoveryService()
    serves = asyncio.create_task(recovery.serve())
    looked = asyncio.Event()
    look = recovery._look

    async def noted() -> float:
        pause_s = await look()
        looked.set()
        return pause_s

    recovery._look = noted
    await looked.wait()
    await asyncio.sleep(0)
    recovery._wake.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    serves.cancel()
    ended, _ = await asyncio.wait({serves}, timeout=DEADLINE_S / 4)
    serves.cancel()
    await asyncio.gather(serves, return_exceptions=True)
    assert ended
    assert serves.cancelled()


async def test_what_ends_beside_the_recoveries_is_told_and_they_go_on(two_jobs, monkeypatch, caplog) -> None:
    async def keep_watched() -> None:
        raise LookupError("nobody expected this")

    monkeypatch.setattr(service, "keep_watched", keep_watched)
    async with serving():
        fail(two_jobs, "f1", "gpt-a")
        await closed(two_jobs, 1)
    assert "keep_watched has ended" in caplog.text
