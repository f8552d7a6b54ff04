"""The accounts of a cluster: what its GPU-seconds were used for, what its jobs earned, and what each fault has cost.

The same accounts are made of a simulated run and of a production journal (`journal_segments`): both are segments.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_lib.simulation.engine import Outcome
from unicron_lib.simulation.ledger import NOBODY, Segment
from unicron_lib.simulation.uses import Use

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one job, or of the cluster.

    `gpu_s` are GPU-seconds by use, which add up to all there were; `waf_flop` is the weighted work done. `elapsed_s` is how
    long it was there, `training_s` how long of that it trained, a job on GPUs of any number, the cluster on all of them.
    """

    gpu_s: Mapping[Use, float]
    waf_flop: float
    elapsed_s: float
    training_s: float

    @property
    def total_gpu_s(self) -> float:
        """All its GPU-seconds."""
        return sum(self.gpu_s.values())

    @property
    def goodput(self) -> float:
        """The share of its GPU-seconds that were training, 0.0 if it had none."""
        total = self.total_gpu_s
        return self.gpu_s.get(Use.TRAINING, 0.0) / total if total else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: training time by elapsed time, the time in which a job waits for GPUs included."""
        return self.training_s / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one cause has cost: GPU-seconds that trained nothing, and their price.

    `waf_flop` is the weighted work that was not done, against the speed that each job last had without any such cause: also
    by jobs that go on with fewer GPUs, or stop, in favour of others. It is negative where the jobs gained.
    """

    gpu_s: float
    waf_flop: float
    dollars: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All accounts. The `losses` are by cause, "" for what no fault has caused, such as the move of a job that arrives."""

    cluster: Account
    jobs: Mapping[str, Account]
    losses: Mapping[str, Loss]
    dollars: float

    @property
    def accumulated_waf(self) -> float:
        """The paper's figure: weighted FLOP over the whole time."""
        return self.cluster.waf_flop


def of_outcome(outcome: Outcome) -> Books:
    """The accounts of a simulated run."""
    return books(
        outcome.segments,
        weights={job.job: job.weight for job in outcome.jobs},
        capacity_gpu_s=outcome.cluster.num_gpus * outcome.duration_s,
        duration_s=outcome.duration_s,
        gpu_dollars_h=outcome.cluster.gpu_dollars_h,
    )


def books(
    segments: Sequence[Segment],
    *,
    weights: Mapping[str, float],
    capacity_gpu_s: float,
    duration_s: float,
    gpu_dollars_h: float,
) -> Books:
    """The accounts of `segments`; of `capacity_gpu_s`, all GPU-seconds that there were, the rest was idle."""
    by_job: defaultdict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_job[segment.job].append(segment)
    jobs = {name: _of_job(own, weights[name]) for name, own in sorted(by_job.items()) if name != NOBODY}
    used: defaultdict[Use, float] = defaultdict(float)
    for segment in segments:
        used[segment.use] += segment.gpu_s
    used[Use.IDLE] += max(0.0, capacity_gpu_s - sum(used.values()))
    training_s = duration_s * used[Use.TRAINING] / capacity_gpu_s if capacity_gpu_s else 0.0
    flop = sum(account.waf_flop for account in jobs.values())
    return Books(
        cluster=Account(gpu_s=dict(used), waf_flop=flop, elapsed_s=duration_s, training_s=training_s),
        jobs=jobs,
        losses=_losses(segments, weights, gpu_dollars_h),
        dollars=capacity_gpu_s / HOUR_S * gpu_dollars_h,
    )


def _of_job(segments: Sequence[Segment], weight: float) -> Account:
    used: defaultdict[Use, float] = defaultdict(float)
    training_s = 0.0
    for segment in segments:
        used[segment.use] += segment.gpu_s
        training_s += segment.duration_s if segment.use is Use.TRAINING and segment.gpus else 0.0
    flop = weight * sum(segment.flop for segment in segments)
    return Account(gpu_s=dict(used), waf_flop=flop, elapsed_s=_span(segments), training_s=training_s)


def _span(segments: Sequence[Segment]) -> float:
    return max(s.until_s for s in segments) - min(s.from_s for s in segments)


def _losses(segments: Sequence[Segment], weights: Mapping[str, float], gpu_dollars_h: float) -> dict[str, Loss]:
    normal: dict[str, float] = {}
    gpu_s: defaultdict[str, float] = defaultdict(float)
    flop: defaultdict[str, float] = defaultdict(float)
    for segment in sorted(segments, key=lambda segment: segment.from_s):
        if segment.use is not Use.TRAINING:
            gpu_s[segment.cause] += segment.gpu_s
        if segment.job == NOBODY:
            continue
        if not segment.cause and segment.use is Use.TRAINING:
            normal[segment.job] = segment.flops
        lost = normal.get(segment.job, 0.0) - segment.flops
        flop[segment.cause] += weights[segment.job] * lost * segment.duration_s
    return {
        cause: Loss(gpu_s=gpu_s[cause], waf_flop=flop[cause], dollars=gpu_s[cause] / HOUR_S * gpu_dollars_h)
        for cause in sorted({*gpu_s, *flop})
    }


def curve(segments: Iterable[Segment], weights: Mapping[str, float]) -> list[tuple[float, float]]:
    """WAF over time: from each of these times (s) on it is so many FLOP/s, weighted."""
    turns: defaultdict[float, float] = defaultdict(float)
    for segment in segments:
        if segment.job != NOBODY:
            turns[segment.from_s] += weights[segment.job] * segment.flops
            turns[segment.until_s] -= weights[segment.job] * segment.flops
    found, level = [], 0.0
    for at_s, step in sorted(turns.items()):
        level += step
        found.append((at_s, max(level, 0.0)))
    return found
