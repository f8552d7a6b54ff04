"""A comparison as plain data, for JSON and tables: every number with its seeds, its interval and what was fitted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from unicron_lib.simulation.accounting import HOUR_S, Account, Books
from unicron_lib.simulation.comparison import Comparison, Mean, Result
from unicron_lib.simulation.scenes import Scene
from unicron_lib.simulation.uses import NOT_BADPUT

COSTLIEST = 10
"""So many faults are listed by what they have cost."""


def as_json(scene: Scene, found: Comparison, *, command: str) -> dict[str, Any]:
    """All of it.

    `ratio_to_unicron` is a policy's WAF as a share of Unicron's; `unicron_is_times` is the other way round, as
    published ratios are. Either is None where it would be a division by nothing earned.
    """
    traces = list(scene.traces.values())
    return {
        "trace": found.trace,
        "source": traces[0].source,
        "duration_s": traces[0].duration_s,
        "seeds": list(scene.traces),
        "faults": {seed: len(trace.faults) for seed, trace in scene.traces.items()},
        "cluster": asdict(scene.cluster),
        "workload": scene.workload.name,
        "reference": found.reference,
        "fitted": list(scene.fitted),
        "policies": {name: _of_policy(found, result) for name, result in found.results.items()},
        "below": [asdict(run) for run in found.below()],
        "command": command,
    }


def _of_policy(found: Comparison, result: Result) -> dict[str, Any]:
    name, books = result.policy, list(result.books.values())
    waf, ratio, times = result.accumulated_waf, found.ratio(name), found.times(name)
    badput_s = fmean(sum(it.gpu_s for it in own.losses.values()) for own in books)
    return {
        "accumulated_waf": waf.mean,
        "accumulated_waf_95": interval(waf),
        "ratio_to_unicron": ratio and ratio.mean,
        "ratio_to_unicron_95": interval(ratio),
        "unicron_is_times": times and times.mean,
        "unicron_is_times_95": interval(times),
        "published": found.published.get(name),
        "fitted": list(result.fitted),
        **_account([own.cluster for own in books]),
        "ettr_of_jobs": fmean(account.ettr for own in books for account in own.jobs.values()),
        "lost_gpu_h": badput_s / HOUR_S,
        "dollars": fmean(own.dollars for own in books),
        "lost_dollars": fmean(sum(it.dollars for it in own.losses.values()) for own in books),
        "accumulated_waf_by_seed": {seed: own.accumulated_waf for seed, own in result.books.items()},
        "jobs": {job.job: _job(job.job, books) for job in found.jobs},
        "costliest_of_first_seed": _costliest(books[0]),
    }


def interval(mean: Mean | None) -> list[float] | None:
    """Its two ends, None for one seed or no mean."""
    return None if mean is None or mean.low is None or mean.high is None else [mean.low, mean.high]


def _account(accounts: Sequence[Account]) -> dict[str, Any]:
    uses = sorted({use for account in accounts for use in account.gpu_s})
    gpu_h = {str(use): fmean(account.gpu_s.get(use, 0.0) for account in accounts) / HOUR_S for use in uses}
    return {
        "ettr": fmean(account.ettr for account in accounts),
        "goodput": fmean(account.goodput for account in accounts),
        "gpu_h": gpu_h,
        "badput_gpu_h": {use: hours for use, hours in gpu_h.items() if use not in NOT_BADPUT and hours},
    }


def _job(name: str, books: Sequence[Books]) -> dict[str, Any]:
    accounts = [own.jobs[name] for own in books if name in own.jobs]
    if not accounts:  # it comes after the end
        return {"accumulated_waf": 0.0}
    return {"accumulated_waf": fmean(account.waf_flop for account in accounts), **_account(accounts)}


def _costliest(books: Books) -> Mapping[str, Any]:
    faults = sorted(books.losses.items(), key=lambda it: -it[1].gpu_s)
    return {cause or "no fault": asdict(loss) for cause, loss in faults[:COSTLIEST]}
