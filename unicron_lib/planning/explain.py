"""Why an allocation is what it is, in sentences for a person on call at 3 am."""

import math
from collections.abc import Iterable, Mapping, Sequence

from unicron_lib.planning.allocation import Allocation
from unicron_lib.planning.waf import Demand, waf_flops


def allocation_reason(
    allocation: Allocation, demands: Sequence[Demand], *, cause: str, num_gpus: int, total_gpus: int, notes: Iterable[str] = ()
) -> str:
    """What happened, who gets what instead of what, what that is worth, and how sure that is."""
    gpus = allocation.gpus
    by_name = sorted(demands, key=lambda demand: demand.job)
    changes = ", ".join(f"{demand.job} {demand.current_gpus} -> {gpus[demand.job]}" for demand in by_name)
    before = math.fsum(demand.weight * demand.current_flops for demand in demands)
    after = math.fsum(waf_flops(demand, gpus[demand.job]) for demand in demands)
    idle = num_gpus - sum(gpus.values())
    return _text(
        cause,
        f"{num_gpus} of {_gpus(total_gpus)} can be used",
        f"GPUs: {changes}" if changes else "No job wants GPUs",
        f"Weighted throughput {before:.3g} -> {after:.3g} FLOP/s" if demands else "",
        _idle(idle, is_certain=allocation.optimal) if idle and demands else "",
        *(_waiting(demand, num_gpus) for demand in by_name if not gpus[demand.job]),
        *notes,
        f"This is {allocation.reason}" if demands else "",
        "" if allocation.optimal else f"At most {allocation.gap:.2%} more could be gained",
    )


def restart_reason(*, cause: str, restarted: Mapping[str, int], stopped: Sequence[str] = ()) -> str:
    """Who starts again on the GPUs that it has, and that nobody else is touched."""
    again = ", ".join(f"{job} ({_gpus(num_gpus)})" for job, num_gpus in sorted(restarted.items()))
    return _text(
        cause,
        f"{again} starts again where it is, and no other job is touched" if len(restarted) == 1 else "",
        f"These start again where they are, and no other job is touched: {again}" if len(restarted) > 1 else "",
        "" if restarted else "No job has to start again",
        f"Stopped: {', '.join(stopped)}" if stopped else "",
    )


def _idle(num_gpus: int, *, is_certain: bool) -> str:
    stays = f"{_gpus(num_gpus)} {'stays' if num_gpus == 1 else 'stay'} idle"
    return f"{stays}: no job would gain by more" if is_certain else stays


def _waiting(demand: Demand, num_gpus: int) -> str:
    fitting = [size for size in demand.throughput_flops if size <= num_gpus]
    if not demand.throughput_flops:
        return f"{demand.job} waits: there is no number of GPUs on which it can run"
    if not fitting:
        return f"{demand.job} waits: it needs at least {_gpus(demand.min_gpus)}"
    if not any(demand.throughput_flops[size] for size in fitting):
        return f"{demand.job} waits: its throughput is 0 on every size that fits"
    return f"{demand.job} waits: the {_gpus(min(fitting))} that it needs at least bring more in other jobs"


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _text(*parts: str) -> str:
    sentences = (part.strip().rstrip(".") for part in parts if part.strip())
    return " ".join(f"{sentence}." for sentence in sentences)
