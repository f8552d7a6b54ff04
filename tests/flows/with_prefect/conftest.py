"""A Prefect server for all tests of this folder; each finds only the deployments of `prefect.yaml` on it."""

from dataclasses import replace

import pytest
from prefect import get_client
from prefect.events import emit_event
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_DEFAULT_RESULT_STORAGE_BLOCK,
    PREFECT_HOME,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect_site import ROOT, WholeController, serving

from flows import response
from flows.deployments import load, prepare, register
from tasks.results import BLOCK_NAME


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("prefect")) as server:
        yield server


@pytest.fixture
async def clear_runs(prefect_server):
    """The server without a flow run."""
    with temporary_settings({PREFECT_API_URL: prefect_server.url}):
        async with get_client() as client:
            for run in await client.read_flow_runs():
                await client.delete_flow_run(run.id)


@pytest.fixture
async def with_prefect(prefect_server, clear_runs, site, monkeypatch, tmp_path):
    """The fake site of two nodes and one job, whose flows speak to the real server; task results go to its store."""
    made = response.services()
    made = replace(made, controller=WholeController(site.agents))
    modules = ("tasks.health", "tasks.planning", "tasks.transition", "tasks.memory", "tasks.sending")
    for module in (*modules, "flows.response", "flows.recording", "flows.service", "flows.watching", "flows.burials"):
        monkeypatch.setattr(f"{module}.services", lambda: made)
    monkeypatch.setattr("tasks.events.emit_event", emit_event)
    site.controller = made.controller
    settings = {
        PREFECT_API_URL: prefect_server.url,
        PREFECT_LOGGING_TO_API_ENABLED: False,
        PREFECT_HOME: tmp_path / "prefect",
        PREFECT_DEFAULT_RESULT_STORAGE_BLOCK: f"unicron-store/{BLOCK_NAME}",
    }
    with temporary_settings(settings):
        await prepare(made.settings.store_url)
        await register(load(ROOT / "prefect.yaml"))
        yield site
