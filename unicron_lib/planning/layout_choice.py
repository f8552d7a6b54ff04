"""In which of its layouts a job runs on a number of GPUs: the one in which it does the most FLOP/s there. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.calibration import Scaling, calibrated
from unicron_lib.planning.layouts import Candidate, Device, Model, memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout, the FLOP/s of the whole job in it, and who says so."""

    layout: Layout
    flops: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """T(t, x) of a job with several layouts: on x GPUs, that of the best one.

    `allowed` gives the layouts on a number of GPUs in the owner's order. `given` (layouts to FLOP/s) goes before `measured`,
    and that before the `model`, which the measurements of all layouts calibrate; without any, `scaling` stands for them.
    `given_by` says what tells the given layouts of a size apart.
    """

    allowed: Callable[[int], Sequence[Layout]]
    model: Callable[[Layout], float]
    given: Mapping[Layout, float] = field(default_factory=dict)
    given_by: str = "by its table"
    measured: Mapping[Layout, float] = field(default_factory=dict)
    scaling: Scaling = field(default_factory=Scaling)

    def ranked(self, size: int) -> tuple[Priced, ...]:
        """The layouts on `size` GPUs, the best first.

        Of equals first the one that the model prefers, then the one of most replicas, then the one that its owner names first.
        """
        found = [self._priced(layout) for layout in self.allowed(size)]
        return tuple(sorted(found, key=lambda it: (-it.flops, -self.model(it.layout), -it.layout.dp)))

    def flops(self, size: int) -> float:
        """T(t, x) in FLOP/s, 0.0 on a number of GPUs that no layout has."""
        return max(map(self.flops_in, self.allowed(size)), default=0.0)

    def flops_in(self, layout: Layout) -> float:
        """FLOP/s of the whole job in `layout`."""
        return self._priced(layout).flops

    def _priced(self, layout: Layout) -> Priced:
        for points, source in ((self.given, self.given_by), (self.measured, "measured")):
            if layout in points:
                return Priced(layout=layout, flops=points[layout], source=source)
        return Priced(layout=layout, flops=self._scaling(self.model(layout)), source="by the model")

    @cached_property
    def _scaling(self) -> Scaling:
        return calibrated(self.model, self.measured) if any(flops > 0 for flops in self.measured.values()) else self.scaling


def given(spec: JobSpec) -> dict[Layout, float]:
    """What the owner's tables say: one for each layout, or one for all."""
    tables = {it.replica.shape: it.throughput_flops for it in spec.parallel_layouts if it.throughput_flops}
    return dict(_by_layout(spec, tables or {it.replica.shape: spec.throughput_flops for it in spec.parallel_layouts}))


def measured(spec: JobSpec, by_shape: Mapping[str, Mapping[int, float]]) -> dict[Layout, float]:
    """What was measured in each layout that the job may still have."""
    return dict(_by_layout(spec, by_shape))


def _by_layout(spec: JobSpec, tables: Mapping[str, Mapping[int, float]]) -> Iterator[tuple[Layout, float]]:
    for shape, table in tables.items():
        for size, flops in table.items():
            yield from ((layout, flops) for layout in spec.layouts(size) if layout.shape == shape)


def allowed(spec: JobSpec, model: Model, device: Device | None) -> Callable[[int], Sequence[Layout]]:
    """The job's layouts by number of GPUs, without those that are reckoned to need more memory than the `device` has.

    If none fits, or the device is unknown, all are: then the owner knows better.
    """
    replicas = [it.replica for it in spec.parallel_layouts]
    fits = {it.shape for it in replicas if device and memory_bytes(model, _filled(spec, it)) <= device.memory_bytes}
    shapes = fits or {it.shape for it in replicas}
    return lambda size: [layout for layout in spec.layouts(size) if layout.shape in shapes]


def _filled(spec: JobSpec, replica: Layout) -> Candidate:
    """One replica alone has the most micro-batches in flight."""
    return Candidate(layout=replica, micro_batch=spec.micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """What the jobs with a choice of layouts may have on each number of GPUs, the best first."""

    ranked: Mapping[str, Mapping[int, tuple[Priced, ...]]] = field(default_factory=dict)

    def best(self, job: str, num_gpus: int) -> Priced | None:
        """The layout on so many GPUs; None for a job without a choice."""
        return next(iter(self.ranked.get(job, {}).get(num_gpus, ())), None)

    def without_best(self, job: str, num_gpus: int) -> Self:
        """As if the best one were not there."""
        own = self.ranked.get(job, {})
        return replace(self, ranked={**self.ranked, job: {**own, num_gpus: own.get(num_gpus, ())[1:]}})

    def told(self, job: str, num_gpus: int, before: Layout | None) -> str:
        """Why the job has its layout, and what it was before; "" for a job without a choice."""
        best = self.best(job, num_gpus)
        if best is None:
            return ""
        count = len(self.ranked[job][num_gpus])
        place = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        why = f"the best of {count} layouts on {place} {best.source}" if count > 1 else f"the only layout on {place}"
        layout = best.layout
        is_kept = before is not None and before.shape == layout.shape
        if is_kept and before == layout:
            why = f"which it keeps on {place}"
        came = "" if before is None or is_kept else f" instead of {before.shape}"
        return f"{job} runs in {layout.shape} dp={layout.dp}{came}: {why}"


def kept_first(ranked: Sequence[Priced], present: Layout | None) -> tuple[Priced, ...]:
    """With the `present` layout of a running job first: on as many GPUs as it has it does not change its layout."""
    return tuple(sorted(ranked, key=lambda it: it.layout != present))
