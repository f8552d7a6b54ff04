"""Ranks that say too much, nonsense, or nothing at all: the agent stays up, small, and loses nothing that matters."""

import time
from pathlib import Path

import psutil
import pytest
from local_cluster import LocalCluster, eventually, launch

from unicron_lib.agent.messages import Observation, RankExited
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.agent.repeats import MOST_TOLD
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import DetectionMethod, ErrorKind

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


async def heard(cluster: LocalCluster, job: str, last: str) -> list[Observation]:
    """All that is observed of `job` until an error of type `last`; each is acknowledged."""
    found: list[Observation] = []

    async def ask() -> bool:
        waiting = await cluster.client.observations(job=job, wait_s=1.0)
        found.extend(waiting)
        await cluster.client.acknowledge([observation.id for observation in waiting])
        return any(isinstance(o.body, RankFailed) and o.body.error_type == last for o in found)

    await eventually(ask, f"all of {job} is heard")
    return found


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


async def test_pb72_a_flood_costs_neither_memory_nor_a_word_nor_the_other_ranks(cluster: LocalCluster) -> None:
    """PB72: 10,000 reports as fast as they come, broken lines, lines of 50 MB."""
    await cluster.launch("step", ranks=1, job="calm")
    await cluster.client.job_progress("calm", generation=1, world_size=1, wait_s=10)
    agent = psutil.Process(cluster.processes[1].pid)
    before_bytes, began = agent.memory_info().rss, time.monotonic()
    await cluster.launch("flood", ranks=1, job="loud")
    found = await heard(cluster, "loud", "Last")
    grown_bytes = peak_bytes(agent.pid) - before_bytes
    print(f"{len(found)} observations in {time.monotonic() - began:.1f} s, {grown_bytes / 2**20:.0f} MiB more at the most")  # noqa: T201
    said = [o.body.message for o in found if isinstance(o.body, RankFailed)]
    distinct = [m.partition("\n") for m in said if m.startswith("distinct")]
    first = [f"distinct {5 * number}" for number in range(MOST_TOLD - 1)]
    assert [m for m, _, counted in distinct if not counted] == first, "and the one that is said again and again"
    assert [counted for _, _, counted in distinct if counted] == [
        f"[one of {10**n} beyond the first {MOST_TOLD}, which are counted only]" for n in range(4)
    ]
    assert [m.partition("\n")[2] for m in said if m.startswith("the same")] == [
        "",
        *(f"[said {10**n} times so far]" for n in (1, 2, 3)),
    ]
    assert [m[:8].strip("x") for m in said if m.startswith("huge")] == ["huge", "huge too"]
    assert all(len(m) < 40_000 for m in said)
    assert [o.seq for o in found] == sorted(o.seq for o in found)
    assert grown_bytes < 100 << 20

    seen = await cluster.client.job_progress("calm")
    assert seen is not None
    reached = max(seen.iterations.values())

    async def goes_on() -> bool:
        later = await cluster.client.job_progress("calm")
        return later is not None and max(later.iterations.values()) > reached

    await eventually(goes_on, "the other rank is heard")
    assert await cluster.client.observations(job="calm") == ()


@pytest.mark.parametrize(
    ("behaviour", "code", "kind", "method"),
    [
        ("raise", 1, ErrorKind.USER_ERROR, DetectionMethod.EXCEPTION),
        ("segfault", -11, ErrorKind.PROCESS_EXIT, DetectionMethod.PROCESS),
        ("exit16", 16, ErrorKind.CUDA_ERROR, DetectionMethod.PROCESS),
    ],
)
async def test_pb16_the_end_of_a_rank_that_says_nothing(
    cluster: LocalCluster, behaviour: str, code: int, kind: ErrorKind, method: DetectionMethod
) -> None:
    """PB16: its own code and signal, and what it leaves in its error file."""
    await cluster.launch(behaviour, ranks=1, job=behaviour)
    seen = await cluster.observation("rank_exited", behaviour)
    assert isinstance(seen.body, RankExited)
    assert seen.body.exit_code == code
    failure = classify(seen)
    assert failure is not None
    assert (failure.kind, failure.method) == (kind, method)
    assert ("KeyError: 'input_ids'" in seen.body.error) is (behaviour == "raise")


async def test_an_error_file_of_an_earlier_life_of_the_job_is_not_believed(cluster: LocalCluster) -> None:
    """A job that was cancelled and submitted again under its name counts its generations anew."""
    path = cluster.directory / "run/errors/again/g1-r0.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"message": "CUDA error: uncorrectable ECC error encountered"}')
    await cluster.launch("exit16", ranks=1, job="again")
    seen = await cluster.observation("rank_exited", "again")
    assert isinstance(seen.body, RankExited)
    assert seen.body.error == ""


async def test_pb47_no_failure_of_a_dying_process_is_lost(cluster: LocalCluster) -> None:
    """PB47: it reports and is gone at once, 20 times."""
    for generation in range(1, 21):
        assert (await cluster.client.command("n0", launch("fail", ranks=1, job="brief", generation=generation))).ok

    async def all_told() -> bool:
        waiting = await cluster.client.observations(job="brief")
        told = [o.body.generation for o in waiting if isinstance(o.body, RankFailed)]
        return sorted(told) == list(range(1, 21))

    await eventually(all_told, "each of 20 failures is told")
