"""The benches of detection and of overhead, on a small scale: real processes are measured, and nothing is left."""

import math

import pytest

from unicron_lib.cli import overhead_figures
from unicron_lib.cli.detection_figures import Rounds, measure
from unicron_lib.local.bench_cluster import BenchFailed, bench_cluster


async def test_real_processes_are_measured_and_nothing_is_left() -> None:
    """The first two kinds, once each."""
    rounds = []
    async with bench_cluster() as cluster:
        figures = measure(cluster, Rounds(number=1, done=lambda: rounds.append(1)))
        found = [await anext(figures), await anext(figures)]
        await figures.aclose()
    assert [len(latency.samples) for latency in found] == [1, 1]
    assert len(rounds) == 2
    assert all(0.0 < latency.median < math.inf for latency in found)
    assert not cluster.directory.exists()


async def test_an_agent_that_cannot_start_is_told_at_once() -> None:
    async with bench_cluster() as cluster:
        with pytest.raises(BenchFailed, match=r"ended with 2: .*--num-gpus is -1"):
            await cluster.add_nodes("wrong", num_gpus=-1)


async def test_overhead_is_measured_by_a_real_rank() -> None:
    async with bench_cluster() as cluster:
        found = await overhead_figures.measure(cluster, 3, iteration_s=0.01)
    assert found.num_pairs == 3
    assert found.telling.median > 0.0
    assert found.agent_cores >= 0.0
    assert found.iteration_s > 0.0
