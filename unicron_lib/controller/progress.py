"""How far each job is, from what its ranks tell. Pure: time is an argument, little history is kept."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from unicron_lib.agent.messages import RankInfo
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.controller.liveness import Stepping
from unicron_lib.controller.origins import origin_of
from unicron_lib.controller.views import JobProgress
from unicron_lib.detection.loss_guard import Point
from unicron_lib.detection.windows import Windows

CURVE = 128
"""Iterations whose losses are kept: many times what happens between two looks at them."""


@dataclass(slots=True, kw_only=True)
class _Told:
    progress: Progress
    node: str
    received_at: float


@dataclass(slots=True, kw_only=True)
class _Job:
    generation: int = -1
    first_iteration_at: float = 0.0
    ranks: dict[int, _Told] = field(default_factory=dict)
    measured_flops: dict[int, float] = field(default_factory=dict)
    windows: Windows = field(default_factory=Windows)
    curve: deque[Point] = field(default_factory=lambda: deque(maxlen=CURVE))


class ProgressTable:
    """The newest progress of each rank of each job's newest generation."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def add(self, progress: Progress, *, node: str, now: float) -> bool:
        """Take in a report that `node` passed on at `now` (monotonic); False if it is no news."""
        job = self._jobs.setdefault(progress.job, _Job())
        if progress.generation < job.generation:
            return False
        if progress.generation > job.generation:
            job.generation, job.first_iteration_at, job.ranks = progress.generation, progress.at, {}
            job.measured_flops = {}  # whoever wants them has journalled them; the next generation may run on other GPUs
            job.windows = Windows()
            job.curve.clear()
        told = job.ranks.get(progress.rank)
        if told and told.progress.iteration >= progress.iteration:
            return False
        job.ranks[progress.rank] = _Told(progress=progress, node=node, received_at=now)
        job.windows.add(progress.rank, progress.iteration, compute_s=progress.compute_s, iteration_s=progress.iteration_s)
        if not job.curve or progress.iteration > job.curve[-1].iteration:  # all ranks tell the same
            job.curve.append(Point(iteration=progress.iteration, loss=progress.loss, grad_norm=progress.grad_norm))
        job.first_iteration_at = min(job.first_iteration_at, progress.at)
        best = job.measured_flops.get(progress.world_size, 0.0)
        job.measured_flops[progress.world_size] = max(best, progress.flops)
        return True

    def view(self, name: str) -> JobProgress | None:
        """The state of a job, None if it has never reported."""
        job = self._jobs.get(name)
        if job is None or not job.ranks:
            return None
        reports = [told.progress for told in job.ranks.values()]
        iteration = max(report.iteration for report in reports)
        newest = [report for report in reports if report.iteration == iteration]
        return JobProgress(
            job=name,
            generation=job.generation,
            world_size=newest[-1].world_size,
            iteration=iteration,
            loss=max(report.loss for report in newest),
            iteration_s=max(report.iteration_s for report in newest),
            flops=max(report.flops for report in newest),
            at=max(report.at for report in newest),
            first_iteration_at=job.first_iteration_at,
            iterations={rank: told.progress.iteration for rank, told in sorted(job.ranks.items())},
            measured_flops=dict(sorted(job.measured_flops.items())),
            window=job.windows.newest,
            nodes={rank: told.node for rank, told in sorted(job.ranks.items())},
            curve=tuple(job.curve),
            origins={rank: origin_of(told.progress) for rank, told in sorted(job.ranks.items())},
        )

    def views(self) -> tuple[JobProgress, ...]:
        """The state of all jobs, by name."""
        return tuple(view for name in sorted(self._jobs) if (view := self.view(name)))

    def stepping(self, node: str, ranks: Iterable[RankInfo]) -> Stepping | None:
        """The newest sign, from another node, that `ranks` of `node` step.

        Only a rank that enters an all-reduce needs the others: it tells its `compute_s`. One without collectives goes on alone.
        """
        signs = [
            Stepping(job=rank.job, iteration=told.progress.iteration, reporter=told.node, at=told.received_at)
            for rank in {(rank.job, rank.generation): rank for rank in ranks}.values()
            if (job := self._jobs.get(rank.job)) and job.generation == rank.generation
            for told in job.ranks.values()
            if told.node != node and told.progress.compute_s > 0
        ]
        return max(signs, key=lambda sign: sign.at, default=None)
