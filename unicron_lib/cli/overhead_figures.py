"""What monitoring costs a rank, per iteration: monitored and unmonitored blocks of the same work, alternating in one run."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.local.bench_cluster import BenchCluster
from unicron_lib.local.overhead_rank import ITERATIONS, RESULTS, Block

ITERATION_S = 0.05
BAR = 0.005
NORMAL_95 = 1.96


class Verdict(StrEnum):
    """UNCLEAR: the interval holds the bar, since others use the machine, too."""

    OK = "ok"
    UNCLEAR = "unclear"
    MISSED = "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median as a share of an iteration, and the 95% interval of that median."""

    median: float
    low: float
    high: float

    def against(self, bar: float) -> Verdict:
        """Whether the whole interval is on one side of the bar."""
        return Verdict.OK if self.high <= bar else Verdict.MISSED if self.low > bar else Verdict.UNCLEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Cost of monitoring, held against `bar`.

    `telling` is the processor time that the rank itself spends on it. `wall` and `thread` compare monitored blocks with
    their unmonitored neighbours: on the clock, and in the rank's processor time. `iteration_s` is the median unmonitored
    iteration, `busy_s` its processor time, `agent_cores` the processor time of the agent and its probes, in cores.
    """

    iteration_s: float
    busy_s: float
    telling: Spread
    wall: Spread
    thread: Spread
    agent_cores: float
    num_pairs: int
    bar: float = BAR

    @property
    def ok(self) -> bool:
        """Whether the bar is held for certain by what the rank spends, and nothing shows that it is missed otherwise."""
        return self.telling.against(self.bar) is Verdict.OK and self.verdict is not Verdict.MISSED

    @property
    def verdict(self) -> Verdict:
        """What the three together tell: OK only if each shows that the bar is held, UNCLEAR if one settles nothing."""
        each = {spread.against(self.bar) for spread in (self.telling, self.wall, self.thread)}
        return next(verdict for verdict in (Verdict.MISSED, Verdict.UNCLEAR, Verdict.OK) if verdict in each)

    @property
    def summary(self) -> str:
        """The verdict as a sentence."""
        if self.verdict is Verdict.UNCLEAR and not self.ok:
            return "unclear: nothing shows that the bar is held, more --pairs narrow the intervals"
        return {
            Verdict.OK: "ok: each of the three shows that the bar is held",
            Verdict.UNCLEAR: "ok by what the rank itself spends; what is unclear settles nothing: others use the machine, too",
            Verdict.MISSED: "missed: the bar is not held",
        }[self.verdict]


async def measure(cluster: BenchCluster, num_pairs: int, *, iteration_s: float = ITERATION_S) -> Overhead:
    """Have a rank measure `num_pairs` pairs of blocks; takes half a second a pair."""
    await cluster.add_nodes("overhead", rank_target="unicron_lib.local.overhead_rank:main")
    spec = JobSpec(job="overhead", train_iters=num_pairs, pace_s=iteration_s)
    await cluster.launch("overhead", spec, ranks=1)
    patience_s = 60.0 + 10 * num_pairs * 2 * ITERATIONS * iteration_s
    await cluster.observed(_is_finished, "the end of the measurement", patience_s=patience_s)
    return evaluate(read_blocks(cluster.directory / "run" / RESULTS))


def _is_finished(observation: Observation) -> bool:
    return isinstance(observation.body, RankFinished)


def read_blocks(path: Path) -> list[Block]:
    """The blocks that the rank measured, in their order."""
    return [Block(**block) for block in json.loads(path.read_text())]


def evaluate(blocks: Sequence[Block]) -> Overhead:
    """What pairs of blocks, one of each kind, tell."""
    pairs = [(a, b) if a.monitored else (b, a) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    with_s = sum(monitored.wall_s for monitored, _ in pairs)
    return Overhead(
        iteration_s=statistics.median(plain.wall_s for _, plain in pairs) / ITERATIONS,
        busy_s=statistics.median(plain.thread_s for _, plain in pairs) / ITERATIONS,
        telling=spread([monitored.telling_s / plain.thread_s for monitored, plain in pairs]),
        wall=spread([monitored.wall_s / plain.wall_s - 1 for monitored, plain in pairs]),
        thread=spread([monitored.thread_s / plain.thread_s - 1 for monitored, plain in pairs]),
        agent_cores=sum(monitored.agent_s for monitored, _ in pairs) / with_s,
        num_pairs=len(pairs),
    )


def spread(differences: Sequence[float]) -> Spread:
    """The median, and its 95% interval by the order of the values: nothing is assumed about how they vary."""
    ordered = sorted(differences)
    half = NORMAL_95 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return Spread(median=statistics.median(ordered), low=ordered[low], high=ordered[high])
