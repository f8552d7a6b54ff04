"""Random clusters, by seed: to measure the planner on, and to try to prove it wrong."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from unicron_lib.planning.allocation import Request
from unicron_lib.planning.pools import Market, Offer, Pool
from unicron_lib.planning.waf import Demand

MTBF_GPU_S = 6.2e7
"""Of one GPU, as large clusters see it: one failure in two years."""

TRANSITIONS_S = (0.0, 30.0, 120.0, 300.0)


def cluster(
    *, num_jobs: int, num_gpus: int, seed: int, step: int = 1, largest: int | None = None, current: int | None = None
) -> Request:
    """Jobs that are like real ones: throughput grows by less than the GPUs, and with some noise.

    Sizes are multiples of `step`, up to `largest`; `current` bounds what a job holds now, by default twice its even
    share. What is held never exceeds the cluster.
    """
    dice = random.Random(seed)  # noqa: S311 a seed must give the same cluster again
    top = min(num_gpus, largest or num_gpus)
    free, demands = num_gpus, []
    for number in range(num_jobs):
        smallest = min(step * dice.choice((1, 1, 2, 4)), top)
        per_gpu, power = dice.uniform(1e14, 3e14), dice.uniform(0.85, 0.99)
        table = {size: per_gpu * size**power * dice.uniform(0.9, 1.0) for size in range(smallest, top + 1, step)}
        fitting = [size for size in table if size <= min(free, current or max(2 * num_gpus // num_jobs, smallest))]
        held = dice.choice(fitting) if fitting and dice.random() < 0.8 else 0
        free -= held
        demands.append(_demand(dice, f"job-{number:03}", table, held))
    return Request(demands=tuple(demands), num_gpus=num_gpus, mtbf_gpu_s=MTBF_GPU_S)


def market(*, num_jobs: int, num_gpus: int, num_pools: int, seed: int) -> Market:
    """Pools of `num_gpus` GPUs of different speed, price and reliability. Every job runs in one and could run in any.

    The budget allows for nine tenths of the GPUs, or for what is held already.
    """
    names = [f"pool-{n}" for n in range(num_pools)]
    made = tuple(
        Pool(name=name, num_gpus=num_gpus, mtbf_gpu_s=MTBF_GPU_S / (1 + 9 * n), dollars_per_gpu_h=4.0 / (1 + n))
        for n, name in enumerate(names)
    )
    offers = []
    for n, home in enumerate(names):
        part = cluster(num_jobs=num_jobs // num_pools, num_gpus=num_gpus, seed=num_pools * seed + n, step=8)
        for demand in part.demands:
            elsewhere = {
                name: {size: flops * 0.8 ** abs(m - n) for size, flops in demand.throughput_flops.items()}
                for m, name in enumerate(names)
                if m != n
            }
            known = replace(demand, job=f"{home}-{demand.job}")
            offers.append(Offer(demand=known, pool=home, elsewhere=elsewhere))
    price = {pool.name: pool.dollars_per_gpu_h for pool in made}
    spent = sum(offer.demand.current_gpus * price[offer.pool] for offer in offers)
    most = sum(pool.num_gpus * pool.dollars_per_gpu_h for pool in made)
    return Market(pools=made, offers=tuple(offers), budget_dollars_per_h=max(0.9 * most, spent))


def _demand(dice: random.Random, job: str, table: Mapping[int, float], held: int) -> Demand:
    return Demand(
        job=job,
        throughput_flops=table,
        weight=dice.choice((0.5, 1.0, 2.0)),
        current_gpus=held,
        current_flops=table.get(held, 0.0),
        faulted=bool(held) and dice.random() < 0.1,
        transition_s=dice.choice(TRANSITIONS_S),
    )


def _non_concave(dice: random.Random, size: int) -> float:
    return dice.uniform(0.0, 1e14) * size**2


def _ties(dice: random.Random, size: int) -> float:
    return 1e14 * (size if dice.random() < 0.9 else dice.randint(1, 4))


def _steps(_dice: random.Random, size: int) -> float:
    return 1e14 * (size // 8) * 8


def _adversarial(dice: random.Random, size: int) -> float:
    # as in a subset sum: all options are worth their size, to a part in a million
    return 1e14 * size * (1 + dice.choice((0.0, 1e-6, -1e-6)))


def _any(dice: random.Random, _size: int) -> float:
    return dice.choice((0.0, dice.uniform(1e12, 1e15)))


KINDS: Mapping[str, Callable[[random.Random, int], float]] = {
    "non-concave": _non_concave,
    "ties": _ties,
    "steps": _steps,
    "adversarial": _adversarial,
    "infeasible": _any,
}


def odd(kind: str, *, seed: int) -> Request:
    """A small cluster of one of the `KINDS` that solvers get wrong. Those that are "infeasible" are so more often than not."""
    dice, flops = random.Random(f"{kind} {seed}"), KINDS[kind]  # noqa: S311
    num_gpus = dice.randint(1, 96)
    demands = []
    for number in range(dice.randint(1, 10)):
        smallest = num_gpus // 3 + 1 if kind == "infeasible" else 1
        offered = range(smallest, num_gpus + 1)
        sizes = dice.sample(offered, k=dice.randint(1, min(len(offered), 24)))
        table = {size: flops(dice, size) for size in sorted(sizes)}
        held = dice.choice((0, *table))
        must_run = dice.random() < (0.7 if kind == "infeasible" else 0.05)
        demands.append(replace(_demand(dice, f"job-{number}", table, held), must_run=must_run))
    return Request(demands=tuple(demands), num_gpus=num_gpus, mtbf_gpu_s=dice.choice((1e3, 1e5, MTBF_GPU_S)))
