"""Ranks that run a script of their job's owner, under a real agent and a real controller."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from local_cluster import HERE, LocalCluster, eventually, pids

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import DrainRanks, HoldRanks, OpenRendezvous, RankExited, RankStalled, Reply, StopRanks
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.controller.views import JobProgress
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


async def start(cluster: LocalCluster, job: str, behaviour: str, *, ranks: int = 1, **keys: object) -> Reply:
    command = keys.pop("command", ("python", str(HERE / "command_script.py"), behaviour))
    spec = JobSpec(job=job, command=command, env={"LEVEL": "high"}, hang_patience_s=0.0, **keys)
    return await cluster.launch(job=job, spec=spec, ranks=ranks)


def work(cluster: LocalCluster, job: str) -> Path:
    return cluster.directory / "run" / "work" / job


def log_of(cluster: LocalCluster, job: str, rank: int = 0) -> str:
    return (cluster.directory / "run" / "logs" / job / f"g1-r{rank}.log").read_text()


async def progress_of(cluster: LocalCluster, job: str, iteration: int, ranks: int = 1) -> JobProgress:
    async def ask() -> JobProgress | None:
        found = await cluster.client.job_progress(job)
        return found if found and found.has_stepped(1, ranks) and found.iteration >= iteration else None

    return await eventually(ask, f"iteration {iteration} of {job}")


async def exists(path: Path) -> None:
    async def ask() -> bool:
        return await asyncio.to_thread(path.exists)

    await eventually(ask, f"{path}")


async def stop(cluster: LocalCluster, job: str) -> None:
    reply = await cluster.client.command("n0", StopRanks(step=f"stop-{job}", job=job, below_generation=2, grace_s=1.0))
    assert reply.ok, reply.error


async def test_a_script_with_a_session_tells_its_steps(cluster: LocalCluster) -> None:
    await start(cluster, "steps", "with_session", ranks=2)
    found = await progress_of(cluster, "steps", 5, ranks=2)
    assert found.loss == 1.0
    await stop(cluster, "steps")


async def test_a_rank_is_the_program_itself_with_torchruns_variables(cluster: LocalCluster) -> None:
    (pid,) = pids(await start(cluster, "itself", "mute"))

    async def became() -> bool:
        return "command_script.py" in " ".join(psutil.Process(pid).cmdline())

    await eventually(became, "the rank is the script")
    variables = psutil.Process(pid).environ()
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert os.getsid(pid) == pid, "a session of its own"
    await stop(cluster, "itself")
    assert not psutil.pid_exists(pid)


async def test_exit_code_0_finishes_a_rank_and_nobody_else(cluster: LocalCluster) -> None:
    await start(cluster, "done", "finishes_late", ranks=2)
    observation = await cluster.observation("rank_finished", job="done")
    body = observation.body
    assert isinstance(body, RankFinished)
    assert (body.rank, body.whole_job) == (0, False)
    await progress_of(cluster, "done", -1)
    await stop(cluster, "done")


async def test_a_script_finds_its_own_directory_and_variables(cluster: LocalCluster) -> None:
    await start(cluster, "where", "finishes")
    await cluster.observation("rank_finished", job="where")
    assert f"done {work(cluster, 'where')} high" in log_of(cluster, "where")


@pytest.mark.parametrize("behaviour", ["raises", "raises_alone"])
async def test_an_exception_is_classified_by_its_words(cluster: LocalCluster, behaviour: str) -> None:
    """With a session by its report, without one by the traceback in its log."""
    job = behaviour.replace("_", "-")
    await start(cluster, job, behaviour)
    observation = await cluster.observation("rank_failed" if behaviour == "raises" else "rank_exited", job=job)
    assert isinstance(observation.body, RankFailed if behaviour == "raises" else RankExited)
    failure = classify(observation)
    assert failure is not None
    assert failure.kind is ErrorKind.ILLEGAL_MEMORY_ACCESS
    assert "command_script.py" in failure.evidence
    await stop(cluster, job)


async def test_a_killed_script_is_told(cluster: LocalCluster) -> None:
    await start(cluster, "killed", "with_session")
    await progress_of(cluster, "killed", 1)
    reply = await cluster.client.command("n0", InjectFault(step="kill-killed", fault="crash", job="killed", rank=0))
    assert reply.ok, reply.error
    observation = await cluster.observation("rank_exited", job="killed")
    assert isinstance(observation.body, RankExited)
    assert observation.body.exit_code == -signal.SIGKILL
    assert observation.body.iteration >= 1


async def test_a_script_that_hangs_is_told(cluster: LocalCluster) -> None:
    await start(cluster, "hung", "hangs")
    observation = await cluster.observation("rank_stalled", job="hung")
    assert isinstance(observation.body, RankStalled)
    assert observation.body.section == "step"
    await stop(cluster, "hung")


async def test_a_script_that_says_that_it_saves_is_not_thought_to_hang(cluster: LocalCluster) -> None:
    await start(cluster, "saving", "saves_for_long")
    await exists(work(cluster, "saving") / "saving-0")
    await progress_of(cluster, "saving", 100)
    waiting = await cluster.client.observations(job="saving", wait_s=0.0)
    assert not waiting
    await stop(cluster, "saving")


async def test_a_drain_lets_a_script_with_a_session_save(cluster: LocalCluster) -> None:
    await start(cluster, "parting", "with_session", ranks=2)
    await progress_of(cluster, "parting", 1, ranks=2)
    drain = DrainRanks(step="drain-parting", job="parting", below_generation=2, deadline_s=10.0)
    reply = await cluster.client.command("n0", drain)
    assert [rank["state"] for rank in reply.result["ranks"]] == ["drained", "drained"]
    assert (work(cluster, "parting") / "saved-1").exists()
    assert not await cluster.client.observations(job="parting", wait_s=0.0)


async def test_a_script_that_has_not_come_to_park_is_treated_as_any_other(cluster: LocalCluster) -> None:
    """It is not waited for when something has failed, and let save when nothing has."""
    await start(cluster, "parks-not", "with_session", ranks=2, parks=True)
    await progress_of(cluster, "parks-not", 1, ranks=2)
    asked = {"job": "parks-not", "below_generation": 2, "deadline_s": 10.0}
    lost = await cluster.client.command("n0", HoldRanks(step="hold-1", **asked, abort=True))
    assert [rank["state"] for rank in lost.result["ranks"]] == ["busy", "busy"]
    moved = await cluster.client.command("n0", HoldRanks(step="hold-2", **asked))
    assert [rank["state"] for rank in moved.result["ranks"]] == ["drained", "drained"]
    assert (work(cluster, "parks-not") / "saved-1").exists()
    assert not await cluster.client.observations(job="parks-not", wait_s=0.0)


async def test_a_drain_is_sigterm_to_a_script_without_a_session(cluster: LocalCluster) -> None:
    await start(cluster, "signalled", "handles_sigterm")
    await exists(work(cluster, "signalled") / "ready-0")
    drain = DrainRanks(step="drain-signalled", job="signalled", below_generation=2, deadline_s=10.0)
    reply = await cluster.client.command("n0", drain)
    assert [rank["state"] for rank in reply.result["ranks"]] == ["drained"]
    assert (work(cluster, "signalled") / "saved-0").exists()
    assert not await cluster.client.observations(job="signalled", wait_s=0.0)


async def test_a_script_that_somebody_else_stops_has_not_finished(cluster: LocalCluster) -> None:
    (pid,) = pids(await start(cluster, "preempted", "with_session"))
    await progress_of(cluster, "preempted", 1)
    os.kill(pid, signal.SIGTERM)
    observation = await cluster.observation("rank_exited", job="preempted")
    assert isinstance(observation.body, RankExited)
    assert observation.body.exit_code == 128 + signal.SIGTERM
    assert (work(cluster, "preempted") / "saved-0").exists()


@pytest.mark.parametrize(
    ("job", "command", "told"),
    [
        ("no-program", ("no-such-program",), "the program 'no-such-program' was not found on this node"),
        ("no-script", ("python", "train.py"), "there is no train.py in"),
    ],
)
async def test_a_program_that_is_not_there_stops_the_job(
    cluster: LocalCluster, job: str, command: tuple[str, ...], told: str
) -> None:
    await start(cluster, job, "", command=command)
    failure = classify(await cluster.observation("rank_exited", job=job))
    assert failure is not None
    assert (failure.kind, failure.verdict) == (ErrorKind.USER_ERROR, "stop")
    assert told in failure.evidence
    assert told in log_of(cluster, job)


async def test_a_script_that_says_nothing_counts_as_running_after_a_while(cluster: LocalCluster) -> None:
    await start(cluster, "mute", "mute", ranks=2)
    found = await progress_of(cluster, "mute", -1, ranks=2)
    assert found.iteration == -1
    await stop(cluster, "mute")


async def test_what_megatron_would_go_on_from_is_told_before_the_ranks_are_started(cluster: LocalCluster) -> None:
    folder = work(cluster, "megatron") / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    part = folder / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x")
    keys = {"command": ("python",), "checkpoint_dir": "checkpoints", "repair_tracker": True}
    spec = JobSpec(job="megatron", **keys)
    opened = await cluster.client.command("n0", OpenRendezvous(step="open-megatron", job="megatron", generation=1, spec=spec))
    assert opened.ok, opened.error
    told = str(opened.result["checkpoint"])
    assert "points to iteration 30, which is not there" in told
    assert told.endswith("put back to iteration 20")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "20"
