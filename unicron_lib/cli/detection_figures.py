"""How soon each kind of failure is observed, on real processes: from the fault to what a health task gets."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen
from types import MappingProxyType
from typing import Literal

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.injection import xid_line
from unicron_lib.agent.messages import GpuFault, NodeUnreachable, Observation, RankExited, RankStalled
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.detection.straggler import Finding, StragglerWatch
from unicron_lib.detection.trial import Scenario, Verdict, try_detection
from unicron_lib.detection.windows import WINDOW
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.local.bench_cluster import BenchCluster, BenchFailed
from unicron_lib.local.bench_rank import BENCH, grid_iteration, raised_at

ITERATION_S = 0.1
"""Of the ranks; the hang's bar depends on it."""
WARM = 24
"""Iterations until a rank's usual pace is known well."""
HANG_FACTOR = 3.0
WARM_WINDOWS = 2
SLOW = 1.5
LOOK_S = 5.0
"""Between two looks at the GPUs: faults are spread over it."""
BLACKOUT_S = 60.0
TRIALS: Mapping[str, Scenario] = MappingProxyType(
    {
        "1 s, quiet": Scenario(),
        "1 s, sequence lengths of x0.5 to x2": Scenario(sigma=0.1, lengths=(0.5, 1.0, 2.0), seed=1),
        "1 s, very uneven": Scenario(sigma=0.3, seed=2),
        "1 s, sequence lengths of x0.25 to x2": Scenario(sigma=0.1, lengths=(0.25, 0.5, 1.0, 2.0), seed=4),
        "20 s, sequence lengths of x0.5 to x2": Scenario(iteration_s=20.0, sigma=0.1, lengths=(0.5, 1.0, 2.0), seed=3),
    }
)
"""Days of training that the detectors are tried on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """From the fault to the observation, in `unit`, held against `bar` (None: there is none).

    `paper` is the paper's number as recalled, not checked (None: it has none).
    """

    what: str
    samples: tuple[float, ...]
    bar: float | None = None
    paper: float | None = None
    unit: Literal["s", "iterations"] = "s"

    @property
    def median(self) -> float:
        """Half of them were at most that late."""
        return statistics.median(self.samples)

    @property
    def p95(self) -> float:
        """95% of them were at most that late; the latest of few."""
        return percentile(self.samples, 0.95)

    @property
    def ok(self) -> bool:
        """Whether the bar was held by 95% of them."""
        return self.bar is None or self.p95 <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Each fault is done `number` times; `done` is told after each time."""

    number: int
    done: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[int]:
        for number in range(1, self.number + 1):
            yield number
            self.done()


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest of `samples` that `share` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def try_detectors(name: str) -> Verdict:
    """What the detectors make of one of `TRIALS`."""
    return try_detection(TRIALS[name])


async def measure(cluster: BenchCluster, rounds: Rounds) -> AsyncIterator[Latency]:
    """All kinds of faults, `KINDS` of them."""
    await cluster.add_nodes("ranks", num_gpus=4)
    for job, experiment in EXPERIMENTS.items():
        yield await experiment(cluster, job, rounds)
    for how in CUTS:
        yield await _node_lost(cluster, rounds, how)
    await cluster.add_nodes("gpus", num_gpus=2 * rounds.number)
    yield await _xid(cluster, rounds)
    yield await _gpu_lost(cluster, rounds)


async def _process_exit(cluster: BenchCluster, job: str, rounds: Rounds) -> Latency:
    samples = []
    for generation in rounds:
        (pid,) = await _stepping(cluster, job, generation, iterations=1)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        seen = await cluster.observed(_of(RankExited, job, generation), "a killed rank")
        samples.append(seen.at - began)
    return Latency(what="process exit (SIGKILL of a rank)", samples=tuple(samples), bar=0.1, paper=1.8)


async def _exception(cluster: BenchCluster, job: str, rounds: Rounds) -> Latency:
    samples = []
    for generation in rounds:
        await _stepping(cluster, job, generation, iterations=1)
        await cluster.command("ranks", InjectFault(step=f"{job}/{generation}", fault="exception", job=job))
        seen = await cluster.observed(_of(RankFailed, job, generation), "an exception")
        assert isinstance(seen.observation.body, RankFailed)
        samples.append(seen.at - raised_at(seen.observation.body.message))
    return Latency(what="exception in a rank", samples=tuple(samples), bar=0.1, paper=0.3)


async def _hang(cluster: BenchCluster, job: str, rounds: Rounds) -> Latency:
    samples, iterations = [], []
    for generation in rounds:
        (pid,) = await _stepping(cluster, job, generation, iterations=WARM)
        progress = await cluster.client.job_progress(job)
        assert progress is not None
        iterations.append(progress.iteration_s)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        seen = await cluster.observed(_of(RankStalled, job, generation), "a stopped rank")
        samples.append(seen.at - began)
        os.kill(pid, signal.SIGKILL)
    usual_s = statistics.median(iterations)
    limit_s = HANG_FACTOR * usual_s
    what = f"hang (SIGSTOP of a rank, D_iter {usual_s:.3f} s)"
    return Latency(what=what, samples=tuple(samples), bar=limit_s + 0.5, paper=limit_s)


async def _straggler(cluster: BenchCluster, job: str, rounds: Rounds) -> Latency:
    """One of four ranks takes half as long again for its own part; judged as the train run does."""
    samples = []
    for generation in rounds:
        await _stepping(cluster, job, generation, iterations=WARM_WINDOWS * WINDOW, ranks=4)
        began = grid_iteration(ITERATION_S)
        slow = InjectFault(step=f"{job}/{generation}", fault="slow", job=job, rank=1, amount=SLOW)
        await cluster.command("ranks", slow)
        samples.append(await _found_slow(cluster, job, rank=1) - began)
    what = f"straggler ({SLOW:g} x as slow for its own part)"
    return Latency(what=what, samples=tuple(map(float, samples)), unit="iterations")


async def _found_slow(cluster: BenchCluster, job: str, *, rank: int) -> int:
    """The iteration in which `rank`, and no other, is found to be slow. Raises BenchFailed."""
    watch = StragglerWatch()
    found: list[Finding] = []

    async def look() -> bool:
        live = await cluster.client.job_progress(job)
        found.extend(watch.look(live.generation, live.window) if live else ())
        return bool(found)

    await cluster.eventually(look, f"the straggler of {job}")
    if [finding.rank for finding in found] != [rank]:
        raise BenchFailed(f"rank {rank} was made slow, found was: {found[0].reason}")
    return grid_iteration(ITERATION_S)


EXPERIMENTS = MappingProxyType({"exit": _process_exit, "exception": _exception, "hang": _hang, "straggler": _straggler})
"""With the ranks of a job of that name."""
Cut = Callable[[BenchCluster, str, Popen[bytes]], Awaitable[None]]


async def _killed(_cluster: BenchCluster, _node: str, agent: Popen[bytes]) -> None:
    """SIGKILL of the agent."""
    agent.kill()


async def _stopped(_cluster: BenchCluster, _node: str, agent: Popen[bytes]) -> None:
    """SIGSTOP of the agent."""
    agent.send_signal(signal.SIGSTOP)


async def _partitioned(cluster: BenchCluster, node: str, _agent: Popen[bytes]) -> None:
    """Network partition."""
    await cluster.command(node, InjectFault(step=f"cut/{node}", fault="partition", amount=BLACKOUT_S))


CUTS: tuple[Cut, ...] = (_killed, _stopped, _partitioned)
KINDS = len(EXPERIMENTS) + len(CUTS) + 2
"""Kinds of faults that are measured: with the ranks of a job, at a node, and at a GPU."""


async def _node_lost(cluster: BenchCluster, rounds: Rounds, cut: Cut) -> Latency:
    """One node after the other: if many were lost at once, the controller would take it for its own blindness."""
    names = [f"{cut.__name__.strip('_')}-{number}" for number in range(rounds.number)]
    agents = await cluster.add_nodes(*names)
    samples = []
    for _, (node, agent) in zip(rounds, agents.items(), strict=False):
        began = time.monotonic()
        await cut(cluster, node, agent)
        seen = await cluster.observed(
            lambda it, node=node: isinstance(it.body, NodeUnreachable) and it.node == node,  # type: ignore[misc]
            node,
        )
        samples.append(seen.at - began)
        agent.kill()
    what = f"node lost ({(cut.__doc__ or '').rstrip('.')})"
    return Latency(what=what, samples=tuple(samples), bar=5.6, paper=5.6)


async def _xid(cluster: BenchCluster, rounds: Rounds) -> Latency:
    samples = []
    for gpu, _ in enumerate(rounds):
        began = time.monotonic()
        with cluster.kernel_log.open("a") as log:
            log.write(f"{xid_line(f'0000:{gpu + 1:02x}:00', 79)}\n")
        seen = await cluster.observed(_is_new_gpu_fault(cluster, "gpus"), f"Xid 79 of GPU {gpu}")
        samples.append(seen.at - began)
    return Latency(what="Xid 79 in the kernel log", samples=tuple(samples))


async def _gpu_lost(cluster: BenchCluster, rounds: Rounds) -> Latency:
    began = {}
    for gpu in range(rounds.number, 2 * rounds.number):
        began[gpu] = time.monotonic()
        await cluster.command("gpus", InjectFault(step=f"gpu/{gpu}", fault="gpu-lost", gpu=gpu))
        await asyncio.sleep(LOOK_S / rounds.number)
    samples = []
    for _, (gpu, at) in zip(rounds, began.items(), strict=False):
        seen = await cluster.observed(
            lambda it, gpu=gpu: isinstance(it.body, GpuFault) and it.body.kind == "gpu_lost" and it.body.gpu == gpu,  # type: ignore[misc]
            f"the loss of GPU {gpu}",
        )
        samples.append(seen.at - at)
    return Latency(what="GPU lost, as NVML would tell", samples=tuple(samples))


def _is_new_gpu_fault(cluster: BenchCluster, node: str) -> Callable[[Observation], bool]:
    known = {seen.observation.id for seen in cluster.seen}
    return lambda it: isinstance(it.body, GpuFault) and it.node == node and it.id not in known


async def _stepping(cluster: BenchCluster, job: str, generation: int, *, iterations: int, ranks: int = 1) -> list[int]:
    """A new generation, once it has done so many iterations; its process ids in the order of the ranks."""
    spec = JobSpec(job=job, data_path=BENCH, pace_s=ITERATION_S, train_iters=1)
    pids = await cluster.launch("ranks", spec, ranks=ranks, generation=generation)
    target = grid_iteration(ITERATION_S) + iterations
    await cluster.iterated(job, target, generation=generation, ranks=ranks)
    return pids


def _of(body: type[RankExited | RankFailed | RankStalled], job: str, generation: int) -> Callable[[Observation], bool]:
    return lambda it: isinstance(it.body, body) and (it.body.job, it.body.generation) == (job, generation)
