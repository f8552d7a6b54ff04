"""The worker dies and the process of a train run outlives it, then that dies too: the job never notices either."""

import asyncio
import os
import signal

import psutil
import pytest
from prefect import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from test_survival import train_runs

pytestmark = [pytest.mark.timeout(600), pytest.mark.storm]


def runs_of(cluster, job):
    """States of all train runs of the job by id."""

    async def ask():
        async with get_client() as client:
            named = DeploymentFilter(name=DeploymentFilterName(any_=[job]))
            return {run.id: run.state.type for run in await client.read_flow_runs(deployment_filter=named)}

    with temporary_settings({PREFECT_API_URL: f"{cluster.site.ui_url}/api"}):
        return asyncio.run(ask())


def running(cluster, job):
    return {run for run, state in runs_of(cluster, job).items() if state is StateType.RUNNING}


def are_new(before, now):
    return bool(now) and not now & before


def test_a_train_run_that_lost_its_worker_and_then_its_process(pair):
    jobs = ("big", "small")
    pair.wait("both are watched", lambda: all(len(running(pair, job)) == 1 for job in jobs))
    generations = {job: pair.state.jobs[job].generation for job in jobs}
    processes, runs = set(train_runs(pair)), {job: running(pair, job) for job in jobs}
    assert len(processes) == 2

    pair.kill("worker")
    pair.trains_on()
    assert all(psutil.pid_exists(pid) for pid in processes), "PB50: it outlives its worker and watches on"
    assert {job: running(pair, job) for job in jobs} == runs, "PB50: nobody starts a second one"
    assert set(train_runs(pair)) == processes

    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    # the lease of 60 s, the worker's own start, and the flows': each takes its time on a busy machine
    pair.wait("new train runs", lambda: all(are_new(runs[job], running(pair, job)) for job in jobs), patience_s=400, pause_s=1)
    for job in jobs:
        states = runs_of(pair, job)
        assert all(states[run] is StateType.CRASHED for run in runs[job]), "PB48: no run claims to be running that is not"
        assert len(running(pair, job)) == 1, "PB48: taken up once"
    pair.trains_on()
    assert {job: pair.state.jobs[job].generation for job in jobs} == generations, "the ranks have never been touched"
    pair.wait("their processes", lambda: len(set(train_runs(pair)) - processes) == 2)
    pair.check_journal()
