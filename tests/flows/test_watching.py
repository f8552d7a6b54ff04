"""A job whose train run has died gets another one, and the dead one is told to Prefect, within the lease."""

from types import SimpleNamespace

import httpx
import pytest

from flows import watching
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus

LEASE_S = 60.0


class Watched:
    """One job; the clock is ours, and its train run asks as long as it lives."""

    def __init__(self, monkeypatch):
        self.now, self.asked_at, self.started, self.status = 1000.0, 1000.0, [], JobStatus.RUNNING
        made = SimpleNamespace(journal=self, controller=self)
        monkeypatch.setattr(watching, "services", lambda: made)
        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watching, "prefect_answers", self.prefect_answers)
        monkeypatch.setattr(watching, "_start_another_run", self.start)
        self.patience, self.is_up, self.refusals, self.submission = watching.Patience(), True, 0, "first"

    def refresh(self):
        return ClusterState(jobs={"a": JobState(spec=JobSpec(job="a"), status=self.status, submission=self.submission)})

    async def watchers(self):
        return {} if self.asked_at is None else {"a": self.now - self.asked_at}

    async def prefect_answers(self):
        return self.is_up

    async def start(self, name, job):
        if self.refusals:
            self.refusals -= 1
            raise httpx.HTTPError("503 Service Unavailable")
        self.started.append(self.now)

    async def run(self, seconds, *, alive):
        for _ in range(round(seconds / watching.LOOK_S)):
            self.now += watching.LOOK_S
            self.asked_at = self.now if alive else self.asked_at
            await watching._look(self.patience)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


async def test_a_dead_run_is_replaced_within_the_lease_and_once(watched):
    """PB48."""
    await watched.run(300.0, alive=True)
    assert watched.started == []
    died_at = watched.now
    await watched.run(LEASE_S, alive=False)
    (started,) = watched.started
    assert started - died_at <= LEASE_S - watching.LOOK_S
    await watched.run(300.0, alive=True)
    assert len(watched.started) == 1


async def test_a_server_that_is_busy_for_a_moment_delays_the_new_run_by_one_look(watched):
    await watched.run(60.0, alive=True)
    died_at, watched.refusals = watched.now, 1
    await watched.run(LEASE_S, alive=False)
    (started,) = watched.started
    assert started - died_at <= LEASE_S


async def test_a_run_that_is_silent_for_a_moment_is_left_alone(watched):
    for _ in range(10):
        await watched.run(watching.UNWATCHED_S, alive=False)
        await watched.run(watching.LOOK_S, alive=True)
    assert watched.started == []


async def test_no_run_is_started_while_prefect_is_away_or_for_a_job_that_has_ended(watched):
    watched.is_up = False
    await watched.run(10 * LEASE_S, alive=False)
    watched.is_up, watched.status = True, JobStatus.FINISHED
    await watched.run(10 * LEASE_S, alive=False)
    assert watched.started == []


async def test_a_run_that_was_never_seen_may_take_its_time_to_start(watched):
    watched.asked_at = None
    await watched.run(watching.START_S, alive=False)
    assert watched.started == []
    await watched.run(2 * watching.LOOK_S, alive=False)
    assert len(watched.started) == 1


async def test_the_run_of_a_new_submission_under_an_old_name_has_time_to_start(watched):
    await watched.run(60.0, alive=True)
    watched.status = JobStatus.CANCELLED
    await watched.run(60.0, alive=False)
    watched.status, watched.submission = JobStatus.RUNNING, "second"
    await watched.run(watching.START_S, alive=False)
    assert watched.started == [], "it may still be starting"
    await watched.run(2 * watching.LOOK_S, alive=False)
    assert len(watched.started) == 1, "it has not come"
