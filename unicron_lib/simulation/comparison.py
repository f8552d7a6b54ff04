"""Policies side by side on the same traces: what each earns, against Unicron, with an interval over the seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from types import MappingProxyType

from unicron_lib.simulation.accounting import Books, of_outcome
from unicron_lib.simulation.engine import Outcome, simulate
from unicron_lib.simulation.faults import Trace
from unicron_lib.simulation.policy import Policy
from unicron_lib.simulation.workload import SimCluster, SimJob

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_Z = 1.959964

NOTHING: Mapping[str, float] = MappingProxyType({})

ROUNDING = 1e-9
"""Two runs that differ by less than this share have earned the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over seeds and its 95% interval by Student's t; one seed has none."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one policy: the accounts by seed, and the whole run of the first seed, for pictures."""

    policy: str
    fitted: tuple[str, ...]
    books: Mapping[int, Books]
    first: Outcome

    @property
    def accumulated_waf(self) -> Mean:
        """Weighted FLOP, over the seeds."""
        return mean_of([books.accumulated_waf for books in self.books.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All results by policy; the others are held against `reference`. `published` is what `times` is elsewhere."""

    trace: str
    cluster: SimCluster
    jobs: tuple[SimJob, ...]
    reference: str
    results: Mapping[str, Result]
    published: Mapping[str, float]

    def times(self, policy: str) -> Mean | None:
        """How many times the policy's WAF the reference has accumulated, seed by seed; None if it earned nothing at all."""
        return _quotient(self._pairs(policy))

    def ratio(self, policy: str) -> Mean | None:
        """The policy's WAF as a share of the reference's, seed by seed; None if the reference earned nothing."""
        return _quotient([(waf, own) for own, waf in self._pairs(policy)])

    def below(self) -> tuple["Below", ...]:
        """The runs in which the reference has earned less than another policy."""
        own = self.results[self.reference].books
        return tuple(
            Below(
                policy=name,
                seed=seed,
                surplus_flop=books.accumulated_waf - own[seed].accumulated_waf,
                why=_why(books, own[seed]),
            )
            for name, result in self.results.items()
            for seed, books in result.books.items()
            if books.accumulated_waf > own[seed].accumulated_waf * (1 + ROUNDING)
        )

    def _pairs(self, policy: str) -> list[tuple[float, float]]:
        own = self.results[self.reference].books
        return [(own[seed].accumulated_waf, books.accumulated_waf) for seed, books in self.results[policy].books.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """On `seed` the policy has earned `surplus_flop` weighted FLOP more than the reference; `why` says what differs."""

    policy: str
    seed: int
    surplus_flop: float
    why: str


def compare(
    policies: Sequence[Policy],
    traces: Mapping[int, Trace],
    cluster: SimCluster,
    jobs: Sequence[SimJob],
    *,
    reference: str,
    published: Mapping[str, float] = NOTHING,
    done: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run each policy on the trace of each seed; `done` is told after each run. `reference` names one of the policies."""
    runs: dict[str, dict[int, Books]] = {policy.name: {} for policy in policies}
    firsts: dict[str, Outcome] = {}
    for seed, trace in traces.items():
        for policy in policies:
            outcome = simulate(policy, trace, cluster, jobs)
            firsts.setdefault(policy.name, outcome)
            runs[policy.name][seed] = of_outcome(outcome)
            done()
    results = {
        policy.name: Result(policy=policy.name, fitted=policy.fitted, books=runs[policy.name], first=firsts[policy.name])
        for policy in policies
    }
    name = next(iter(traces.values())).name
    return Comparison(trace=name, cluster=cluster, jobs=tuple(jobs), reference=reference, results=results, published=published)


def _quotient(pairs: Sequence[tuple[float, float]]) -> Mean | None:
    return mean_of([above / below for above, below in pairs]) if all(below for _, below in pairs) else None


def mean_of(values: Sequence[float]) -> Mean:
    """Their mean, with an interval if there are two or more."""
    mean, number = fmean(values), len(values)
    if number < 2:
        return Mean(mean=mean, low=None, high=None)
    half = _t(number - 1) * stdev(values) / sqrt(number)
    return Mean(mean=mean, low=mean - half, high=mean + half)


def _t(freedom: int) -> float:
    """Student's 97.5% quantile: by table, then by the series of Cornish and Fisher, which is right to 0.003 there."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def _why(better: Books, own: Books) -> str:
    """Which job it is that earns less, and what the GPUs did instead."""
    deficits = {job: account.waf_flop - own.jobs[job].waf_flop for job, account in better.jobs.items() if job in own.jobs}
    job = max(deficits, key=lambda name: deficits[name])
    spent = {use: own.cluster.gpu_s.get(use, 0.0) - better.cluster.gpu_s.get(use, 0.0) for use in own.cluster.gpu_s}
    spent = {use: gpu_s for use, gpu_s in spent.items() if use != "training" and gpu_s > 0}
    share = deficits[job] / own.jobs[job].waf_flop if own.jobs[job].waf_flop else 1.0
    most = sorted(spent, key=lambda use: -spent[use])[:2]
    uses = " and ".join(f"{spent[use] / 3600:.3g} GPU-hours more of {use}" for use in most)
    return f"{job} does {share:.2%} more there; here there are {uses or 'as many GPU-hours of each use'}"
