"""`unicron accounts` reads the journal of a cluster."""

import json
import time
from importlib import import_module

import pytest
from memory_store import MemoryStore
from scenes import running_pair
from typer.testing import CliRunner

from unicron_lib.cli import app
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.journal import Journal


@pytest.fixture
def told(monkeypatch):
    """A function that runs the command on the journal of two jobs, of which one has lost a rank for 60 s."""
    scene = running_pair()
    scene.now += 600.0
    failure = scene.fail(ErrorKind.PROCESS_EXIT, next(iter(scene.state.jobs)))
    scene.now += 60.0
    scene.settle()
    journal = Journal(MemoryStore())
    for event in scene.events:
        journal.append(event)

    class Found:
        def journal(self):
            return journal

    monkeypatch.setattr(import_module("unicron_lib.cli.accounts"), "find_target", Found)
    monkeypatch.setattr(time, "time", lambda: scene.now + 300.0)
    incident = next(it.id for it in scene.state.incidents.values() if failure.id in {known.id for known in it.failures})
    return lambda *options: CliRunner().invoke(app, ["accounts", *options]), incident


def test_an_incident_is_charged_with_what_it_cost(told):
    run, incident = told
    books = json.loads(run("--json", "--gpu-dollars-h", "4").stdout)
    cost = next(row for row in books["losses"] if row["incident"] == incident)
    assert cost["gpu_s"] > 60.0
    assert cost["dollars"] == pytest.approx(cost["gpu_s"] / 3600.0 * 4.0)
    assert 0.0 < books["cluster"]["goodput"] < 1.0
    assert sum(books["cluster"]["gpu_s"].values()) == pytest.approx(books["dollars"] / 4.0 * 3600.0)


def test_people_get_tables(told):
    run, incident = told
    shown = run().stdout
    assert "goodput" in shown
    assert incident in shown
