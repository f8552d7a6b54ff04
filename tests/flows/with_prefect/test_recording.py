"""A recovery never waits for Prefect: the flow run that shows it comes later, and shows all of it."""

import asyncio
import logging
import time

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import TaskRunSort
from prefect_site import recovery_service, runs_of, until
from test_prefect_events import all_over

from flows import service
from flows.acts import Act, Overhearing
from flows.recording import Work, shown_by_a_run
from flows.recovery import recover
from flows.response import respond
from flows.service import RecoveryService
from tasks.planning import complete, decide_plan, dismiss
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import StoreError

KINDS = ["plan", "drain", "restore", "stop", "launch", "resume", "complete"]
"""STOP and RESTORE run side by side."""


@pytest.fixture
def overhearing():
    logger, handler = logging.getLogger("unicron"), Overhearing()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)
    logger.removeHandler(handler)


async def shown_of(run):
    """The names of a run's task runs in the order of their beginning, and the states that they ended in."""
    async with get_client() as client:
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        found = await client.read_task_runs(flow_run_filter=of_run, sort=TaskRunSort.EXPECTED_START_TIME_ASC)
        found.sort(key=lambda it: it.start_time or it.expected_start_time)
        names = [it.name.partition(" ")[0] for it in found]
        return [*names[:2], *sorted(names[2:4]), *names[4:]], {it.state.name for it in found}


async def test_a_recovery_is_over_before_its_run_is_made_and_shown_whole_afterwards(with_prefect, monkeypatch, overhearing):
    made, new_run = asyncio.Event(), RecoveryService._new_run

    async def late(service, *args):
        await made.wait()
        return await new_run(service, *args)

    monkeypatch.setattr(RecoveryService, "_new_run", late)
    async with recovery_service():
        with_prefect.fail("f1")
        await until("the recovery", lambda: all_over(with_prefect))
        assert not await runs_of("recover")
        made.set()

        async def is_shown():
            return [run.state.name for run in await runs_of("recover")] == ["Completed"]

        await until("its run", is_shown)
        (run,) = await runs_of("recover")

        async def has_all():  # Prefect takes task runs in late
            return await shown_of(run) == (KINDS, {"Completed"})

        await until("its task runs", has_all)
        async with get_client() as client:
            of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
            artifacts = await client.read_artifacts(artifact_filter=of_run)
        assert [it.type for it in artifacts].count("markdown") == 1


async def test_what_an_act_logs_its_task_run_logs_too(with_prefect, overhearing, caplog):
    with_prefect.fail("f1")
    work = Work()
    with work:
        await respond(work.call)
    with shown_by_a_run(work):
        await recover("open")
    told = [record for record in caplog.records if record.getMessage().startswith("launch gpt-a: ranks")]
    assert {hasattr(record, "task_run_id") for record in told} == {True}
    assert {record.task_run_name for record in told} == {"launch gpt-a"}


async def test_a_run_fails_as_the_work_that_it_shows(with_prefect):
    work = Work()
    with pytest.raises(AttributeError), work:
        await work.call(dismiss, "no action")
    with shown_by_a_run(work):
        state = await recover("open", return_state=True)
    assert state.is_failed()
    assert complete.name not in {act.task.name for act in work._acts}


async def test_what_prefect_cannot_show_is_done_all_the_same(with_prefect, monkeypatch, caplog):
    def no_logger():
        raise LookupError("Prefect is ill")

    with_prefect.fail("f1")
    respond_to = decide(with_prefect.journal.refresh(), time.time())
    act = Act(task=decide_plan, args=(respond_to,))
    plan = await act.do()
    monkeypatch.setattr("flows.acts.get_run_logger", no_logger)
    await act.show_if_possible()
    assert "Prefect did not show plan" in caplog.text
    assert plan.id in with_prefect.journal.refresh().plans


async def test_an_answer_that_broke_off_is_no_recovery_in_prefect_either(with_prefect, monkeypatch):
    """Its run fails as it did; what takes it up again has a run of its own."""
    answer, broken = service.respond, []

    async def breaks_once(call, *, incident):
        if not broken:
            broken.append(incident)
            await until("the first run", lambda: runs_of("recover"))
            raise StoreError("the store is away for a moment")
        await answer(call, incident=incident)

    monkeypatch.setattr(service, "respond", breaks_once)
    monkeypatch.setattr(service, "SHOW_AFTER_S", 0.01)
    async with recovery_service() as serving:
        with_prefect.fail("f1")
        await until("the recovery", lambda: all_over(with_prefect))

        async def both_are_over():
            return sorted(run.state.name for run in await runs_of("recover")) == ["Completed", "Failed"]

        await until("both runs", both_are_over)
        assert not serving._unrecorded
