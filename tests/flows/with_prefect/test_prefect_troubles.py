"""Prefect's troubles in the middle of a recovery: it goes on, does nothing twice and is recorded afterwards."""

import asyncio
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect import get_client
from prefect.flow_engine import run_flow_async
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Pending
from prefect_site import recovery_service, runs_of, until
from test_prefect_events import all_over

from flows.recovery import recover
from unicron_lib.adapters.files import FileStore
from unicron_lib.domain.plans import StepKind
from unicron_lib.errors import StoreError
from unicron_lib.journal import Journal


def done_once(site, before):
    """The effects since `before`, none of them twice."""
    effects = site.agents.effects[before:]
    assert len(effects) == len(set(effects))
    assert len(site.steps()) == len(set(site.steps()))
    return [kind for kind, _ in effects]


async def new_run(parameters):
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("recover/recover")
        return await client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Pending())


@pytest.mark.parametrize("kind", [StepKind.STOP, StepKind.LAUNCH, StepKind.RESUME])
async def test_a_retried_run_does_no_step_again(with_prefect, monkeypatch, kind):
    """PB53: the run fails at a step, a person presses Retry, and it goes on at that step."""
    before, append, refresh, broken = len(with_prefect.agents.effects), Journal.append, Journal.refresh, []

    def breaks(journal, event):
        if event.type == "step_completed" and not broken:
            steps = journal.state.plans[event.plan].plan.steps
            broken.extend(step.id for step in steps if (step.id, step.kind) == (event.id, kind))
        return guarded(append)(journal, event)

    def guarded(call):
        def checked(journal, *args):
            if len(broken) == 1:
                raise StoreError("the store is away")
            return call(journal, *args)

        return checked

    monkeypatch.setattr(Journal, "append", breaks)
    monkeypatch.setattr(Journal, "refresh", guarded(refresh))
    with_prefect.fail("f1")
    run = await new_run({"incident": "open"})
    with pytest.raises(StoreError):
        await run_flow_async(recover, flow_run=run, parameters=run.parameters)
    assert broken, "the step failed"
    async with get_client() as client:
        assert (await client.read_flow_run(run.id)).state.name == "Failed"
        await client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        run = await client.read_flow_run(run.id)
    broken.append("and is back")
    await run_flow_async(recover, flow_run=run, parameters=run.parameters)
    assert all_over(with_prefect)
    kinds = done_once(with_prefect, before)
    assert kinds.count("launch_ranks") == 2
    assert with_prefect.journal.state.jobs["gpt-a"].generation == 2
    assert [run.state.name for run in await runs_of("recover")] == ["Completed"]


async def test_results_that_cannot_be_stored_repeat_nothing(with_prefect, monkeypatch):
    """PB55: the result storage refuses every write while the steps are done."""
    before, put, refused = len(with_prefect.agents.effects), FileStore.put, []

    def refuses(store, key, *args, **keys):
        if key.startswith("results/"):
            refused.append(key)
            raise StoreError("500 Internal Server Error")
        return put(store, key, *args, **keys)

    monkeypatch.setattr(FileStore, "put", refuses)
    with_prefect.fail("f1")
    run = await new_run({"incident": "open"})
    await run_flow_async(recover, flow_run=run, parameters=run.parameters)
    assert all_over(with_prefect)
    assert refused, "results were to be written"
    assert done_once(with_prefect, before).count("launch_ranks") == 2
    assert with_prefect.journal.state.jobs["gpt-a"].generation == 2


async def test_a_server_that_freezes_in_mid_recovery_is_not_waited_for(with_prefect, prefect_server, monkeypatch):
    """PB54: it takes connections and answers nothing from the first command on."""
    before, carry_out, frozen = len(with_prefect.agents.effects), with_prefect.agents.carry_out, []

    def freezes(node, command):
        if not frozen:
            frozen.append(node)
            os.kill(prefect_server.process.pid, signal.SIGSTOP)
        return carry_out(node, command)

    monkeypatch.setattr(with_prefect.agents, "carry_out", freezes)
    try:
        async with recovery_service():
            with_prefect.fail("f1")
            await until("the recovery", lambda: all_over(with_prefect))
            assert frozen
            with_prefect.fail("f2", iteration=20)
            await until("the second", lambda: with_prefect.journal.refresh().jobs["gpt-a"].generation == 3)
            os.kill(prefect_server.process.pid, signal.SIGCONT)

            async def recorded():
                return [run.state.name for run in await runs_of("recover")] == ["Completed", "Completed"]

            await until("both are recorded", recorded)
    finally:
        os.kill(prefect_server.process.pid, signal.SIGCONT)
    done_once(with_prefect, before)


@pytest.fixture(params=["503", "never answers", "breaks off", "is something else"])
def sick_server(request):
    """A Prefect server that calls itself healthy, and the requests that it spoilt."""
    spoilt, over = [], threading.Event()

    class Sick(BaseHTTPRequestHandler):
        def answer(self):
            healthy = self.path.endswith("/health")
            if not healthy:
                spoilt.append(self.path)
            if not healthy and request.param == "never answers":
                over.wait()
            if not healthy and request.param in {"never answers", "breaks off"}:
                self.close_connection = True
                return
            self.send_response(503 if request.param == "503" and not healthy else 200)
            self.end_headers()
            self.wfile.write(b"true" if healthy else b"database is locked")

        def do_GET(self):
            self.answer()

        def do_POST(self):
            self.answer()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Sick) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api", spoilt
        over.set()
        server.shutdown()
        thread.join()


async def test_a_sick_server_is_not_waited_for(with_prefect, sick_server, monkeypatch):
    """PB54: locked database, silence or nonsense: the recovery goes on without it."""
    url, spoilt = sick_server
    monkeypatch.setattr("tasks.events.emit_event", lambda **_: None)
    with temporary_settings({PREFECT_API_URL: url}):
        async with asyncio.timeout(30), recovery_service():
            with_prefect.fail("f1")
            await until("the recovery", lambda: all_over(with_prefect))
    assert spoilt, "Prefect was asked"
