"""T(t, x): the FLOP/s of a job on each number of GPUs: given, measured, or modelled and calibrated by what was measured."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.planning import layout_choice
from unicron_lib.planning.calibration import Scaling, calibrated
from unicron_lib.planning.layout_choice import Choice
from unicron_lib.planning.layouts import Candidate, Device, Model
from unicron_lib.planning.model_profile import A100, BY_NAME, CPU, model_flops

SCALING = 0.95
"""Between and beyond the sizes of a table, twice the GPUs are taken to give 2 ** 0.95 times the FLOP/s."""

ByShape = Mapping[str, Mapping[int, float]]
"""FLOP/s by the shape of a replica and the number of GPUs."""
Pairs = Sequence[tuple[float, float]]
"""Real and modelled FLOP/s of a job on some sizes."""

ON_GPUS = frozenset({"bfloat16"})
"""Data types in which nobody trains on processor cores."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Known `points` (GPUs to FLOP/s) and what follows from them for other sizes.

    With a `model` (GPUs to modelled FLOP/s) the points calibrate it; if none is above zero, `scaling` stands for them.
    Without, the FLOP/s follow a power of the size between two points, and outside of them the power is `SCALING`.
    """

    job: str
    points: Mapping[int, float] = field(default_factory=dict)
    model: Callable[[int], float] | None = None
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        for size, flops in self.points.items():
            if size < 1 or not (math.isfinite(flops) and flops >= 0):
                found = f"the throughput of {size} GPUs is {flops} FLOP/s"
                raise UserError(f"job {self.job}: {found}, it must be a finite number and not negative")

    def flops(self, size: int) -> float:
        """T(t, x) in FLOP/s, 0.0 for no GPU or when nothing is known."""
        if size in self.points:
            return self.points[size]
        if size < 1:
            return 0.0
        return self._scaling(self.model(size)) if self.model else self._interpolated(size)

    @cached_property
    def _scaling(self) -> Scaling:
        measured = any(flops > 0 for flops in self.points.values())
        return calibrated(self.model, self.points) if self.model and measured else self.scaling

    def _interpolated(self, size: int) -> float:
        known = sorted(x for x, flops in self.points.items() if flops > 0)
        if not known:
            return 0.0
        below = max((x for x in known if x < size), default=None)
        above = min((x for x in known if x > size), default=None)
        if below is not None and above is not None:
            power = math.log(self.points[above] / self.points[below]) / math.log(above / below)
            return float(self.points[below] * (size / below) ** power)
        nearest = known[0] if below is None else known[-1]
        return float(self.points[nearest] * (size / nearest) ** SCALING)


def profiles(
    specs: Sequence[JobSpec],
    measured: Mapping[str, Mapping[int, float]],
    *,
    measured_by_shape: Mapping[str, ByShape] = MappingProxyType({}),
    gpu_models: Iterable[str] = (),
) -> dict[str, Profile | Choice]:
    """The profile of each job: its own table, else its model, calibrated by its measurements or else by the other jobs'.

    `gpu_models` are the driver's names for the GPUs of the cluster. Raises UserError, with the job's name, for a number
    that is not finite or negative.
    """
    known = _device(gpu_models)
    device = known or _stand_in(specs)
    choices = {spec.job: _choice(spec, measured_by_shape.get(spec.job, {}), device, known) for spec in _choosing(specs)}
    fixed = {spec.job: spec for spec in specs if spec.job not in choices}
    points = {job: dict(spec.throughput_flops or measured.get(job, {})) for job, spec in fixed.items()}
    models = {job: _modelled(spec, device) for job, spec in fixed.items()}
    own = {job: Profile(job=job, points=known) for job, known in points.items()}
    typical = _typical([*_pairs(points, models), *(_pairs_of(it) for it in choices.values())])
    modelled = {job: replace(own[job], model=models[job], scaling=typical) for job in fixed}
    found: dict[str, Profile | Choice] = {job: replace(choice, scaling=typical) for job, choice in choices.items()}
    return found | {job: (own if spec.throughput_flops else modelled)[job] for job, spec in fixed.items()}


def table(spec: JobSpec, profile: Profile, *, num_gpus: int, granularity_gpus: int = 1) -> dict[int, float]:
    """FLOP/s of each size that the job can be given of `num_gpus` GPUs, in multiples of `granularity_gpus`."""
    return {size: profile.flops(size) for size in spec.sizes(num_gpus) if size % granularity_gpus == 0}


def _choosing(specs: Iterable[JobSpec]) -> Iterator[JobSpec]:
    return (spec for spec in specs if spec.parallel_layouts)


def _choice(spec: JobSpec, by_shape: ByShape, device: Device, known: Device | None) -> Choice:
    """A job with several layouts; only of a `known` device the memory counts."""
    model = model_of(spec)
    return Choice(
        allowed=layout_choice.allowed(spec, model, known),
        model=cache(lambda layout: model_flops(model, device, Candidate(layout=layout, micro_batch=spec.micro_batch_size))),
        given=layout_choice.given(spec),
        given_by="by the model" if spec.throughput_flops else "by its table",
        measured=layout_choice.measured(spec, by_shape),
    )


def _modelled(spec: JobSpec, device: Device) -> Callable[[int], float]:
    """What the model says of a real job: in the layout that the trainer gives it, whether or not we know its memory.

    Of a command nothing is known: twice the GPUs are taken to be twice as fast.
    """
    if spec.command:
        return lambda size: size * device.peak_flops * device.efficiency
    model = model_of(spec)
    return lambda size: model_flops(model, device, Candidate(layout=spec.layout(size), micro_batch=spec.micro_batch_size))


def model_of(spec: JobSpec) -> Model:
    """The model that the job trains, as the trainer trains it: activations are kept."""
    return Model(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        seq_length=spec.seq_length,
        vocab_size=spec.vocab_size,
        global_batch_size=spec.global_batch_size,
        recompute=False,
    )


def _device(gpu_models: Iterable[str]) -> Device | None:
    """The commonest one that is known: jobs are compared on one device."""
    known = Counter(word for name in gpu_models for word in BY_NAME if word in name.upper())
    return BY_NAME[known.most_common(1)[0][0]] if known else None


def _stand_in(specs: Sequence[JobSpec]) -> Device:
    """The device of the cluster as its jobs tell: one for all, so that they can be compared."""
    return A100 if any(spec.params_dtype in ON_GPUS for spec in specs) else CPU


def _pairs(points: Mapping[str, Mapping[int, float]], models: Mapping[str, Callable[[int], float]]) -> Iterator[Pairs]:
    return ([(flops, models[job](size)) for size, flops in own.items()] for job, own in points.items())


def _pairs_of(choice: Choice) -> Pairs:
    return [(flops, choice.model(layout)) for layout, flops in (choice.given or choice.measured).items()]


def _typical(known: Iterable[Pairs]) -> Scaling:
    """What the known jobs of the cluster tell of those that never ran: the mean ratio of real to modelled FLOP/s."""
    means = [
        math.fsum(ratios) / len(ratios)
        for pairs in known
        if (ratios := [math.log(real) - math.log(modelled) for real, modelled in pairs if real > 0])
    ]
    return Scaling(knots=((0.0, math.fsum(means) / len(means)),)) if means else Scaling()
