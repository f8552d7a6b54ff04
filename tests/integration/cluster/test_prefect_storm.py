"""`make storm`: Prefect's worker dies with a recovery in its hands, and its server drowns in events. Jobs notice neither."""

import asyncio
import os
import signal
import threading
import time

import pytest
from prefect import get_client
from prefect.events import Event
from prefect.events.clients import get_events_client
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.settings import PREFECT_API_URL, temporary_settings
from test_orphaned_runs import running
from test_survival import SIZES, train_runs
from whole_cluster import job_file

from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.events import FailureDetected, FaultInjected, StepCompleted
from unicron_lib.domain.jobs import JobStatus

pytestmark = [pytest.mark.storm, pytest.mark.timeout(1200)]
FLOOD_S, EVENTS_PER_S = 60.0, 50
FLOOD = "unicron.test.flood"
JOBS = ("one", "two", "three")


def steps_done(cluster, after):
    """Ids of the steps that were journalled as done since `after`, with repetitions."""
    return [it.event.id for it in cluster.journal.entries() if it.seq > after and isinstance(it.event, StepCompleted)]


def test_a_worker_that_dies_with_a_recovery_in_its_hands_repeats_no_step_of_it(pair):
    """PB53: the automation's run does the first steps and is killed with its worker; a new worker comes, and the service."""
    pair.wait("both are watched", lambda: all(len(running(pair, job)) == 1 for job in SIZES))
    watching, known, seq = set(train_runs(pair)), set(pair.state.incidents), pair.state.seq
    generation = pair.state.jobs["big"].generation
    frozen = pair.pid("recovery")
    os.kill(frozen, signal.SIGSTOP)
    try:
        pair.cli("inject", "crash", "big/1")
        pair.until("the first steps, by the automation's run", lambda _: steps_done(pair, seq))
        doomed = set(train_runs(pair)) - watching
        pair.kill("worker")
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        done_before = set(steps_done(pair, seq))
        assert done_before
    finally:
        os.kill(frozen, signal.SIGCONT)
    pair.calm(SIZES)
    pair.trains_on()
    steps = steps_done(pair, seq)
    assert sorted(steps) == sorted(set(steps))
    assert done_before <= set(steps)
    assert pair.state.jobs["big"].generation == generation + 1, "it was still one plan"
    assert len(pair.new_failures(known)) == 1
    for log in (pair.site.run_dir / "logs" / "big").glob(f"g{generation + 1}-r[0-9].log"):
        assert log.read_text().count("goes on after iteration") == 1, f"{log}: a rank was launched twice"
    pair.check_journal()


class Flood:
    """Events of no use on the server, so many a second; how many of them the server has taken."""

    def __init__(self, api_url):
        self.api_url, self._over, self.sent = api_url, threading.Event(), 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._pour()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    async def _pour(self):
        with temporary_settings({PREFECT_API_URL: self.api_url}):
            began = time.monotonic()
            async with get_events_client() as client:
                while not self._over.is_set():
                    await client.emit(Event(event=FLOOD, resource={"prefect.resource.id": f"unicron.flood.{self.sent}"}))
                    self.sent += 1
                    await asyncio.sleep(began + self.sent / EVENTS_PER_S - time.monotonic())

    def taken(self):
        async def ask():
            async with get_client() as client:
                return (await client.read_events(EventFilter(event=EventNameFilter(name=[FLOOD])), limit=1)).total

        with temporary_settings({PREFECT_API_URL: self.api_url}):
            return asyncio.run(ask())


@pytest.fixture
def three_jobs(cluster, tmp_path):
    """Three running jobs of 2 GPUs each, and no other."""
    cluster.cli("up")
    cluster.until("all nodes", lambda state: state.num_healthy_gpus == 6)
    for name, job in cluster.state.jobs.items():
        if job.status is JobStatus.RUNNING:
            cluster.cli("cancel", name)
    cluster.calm({})
    for name in JOBS:
        cluster.cli("submit", str(job_file(tmp_path, name, throughput_flops={2: 5.0e8}, max_gpus=2, transition_s=1.0)))
    cluster.calm(dict.fromkeys(JOBS, 2))
    cluster.trains_on()
    yield cluster
    for name in JOBS:
        cluster.cli("cancel", name)
    cluster.calm({})


def test_a_flood_of_events_on_sqlite_loses_no_failure_and_spoils_no_recovery(three_jobs):
    """PB54: three job flows, one worker, 50 events a second for a minute, and a failure every ten seconds or so."""
    known, seq = set(three_jobs.state.incidents), three_jobs.state.seq
    three_jobs.wait("a train run of each", lambda: all(len(running(three_jobs, job)) == 1 for job in JOBS))
    runs = {job: running(three_jobs, job) for job in JOBS}
    began, crashes = time.monotonic(), 0
    with Flood(f"{three_jobs.site.ui_url}/api") as flood:
        while time.monotonic() < began + FLOOD_S:
            three_jobs.cli("inject", "crash", f"{JOBS[crashes % 3]}/{crashes % 2}")
            crashes += 1
            three_jobs.until("the failure", lambda _, least=crashes: len(three_jobs.new_failures(known)) >= least)
            three_jobs.calm(dict.fromkeys(JOBS, 2))
        assert flood.taken() > 0, "the server has taken events meanwhile"
    assert flood.sent > EVENTS_PER_S * FLOOD_S / 2, "it was a flood"
    three_jobs.trains_on()
    entries = [it.event for it in three_jobs.journal.entries() if it.seq > seq]
    assert sum(isinstance(it, FaultInjected) for it in entries) == crashes
    assert sum(isinstance(it, FailureDetected) for it in entries) >= crashes
    found = three_jobs.new_failures(known)
    assert {it.status for it in found} <= {IncidentStatus.CLOSED, IncidentStatus.MERGED}
    assert sum(it.fault_at is not None for it in found) == crashes, "each crash is an incident that knows its fault"
    three_jobs.check_journal()
    assert {job: running(three_jobs, job) for job in JOBS} == runs, "the train runs have lived through it"
