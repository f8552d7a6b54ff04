"""The workloads of the paper's figures."""

import pytest

from unicron_lib.simulation.cases import CASES, CLUSTER, KINDS, jobs_of, trace_jobs


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_six_jobs_that_compete(case: int) -> None:
    jobs = jobs_of(case)
    assert len({job.job for job in jobs}) == 6
    assert sum(job.min_gpus for job in jobs) <= CLUSTER.num_gpus < sum(job.max_gpus for job in jobs)


def test_the_jobs_of_the_traces_leave_nothing_idle() -> None:
    assert sum(job.max_gpus for job in trace_jobs()) > CLUSTER.num_gpus
    assert {job.weight for job in trace_jobs()} == {1.0}


def test_published_figures_are_kept() -> None:
    for kind in KINDS.values():
        table = kind.job("j", max_gpus=64).throughput_flops
        for size, tflops in kind.tflops.items():
            assert table.get(size, 1e12 * tflops * size) == pytest.approx(1e12 * tflops * size)


def test_weights_rise_or_fall_with_the_models_size() -> None:
    rising, falling = ([(job.num_params, job.weight) for job in jobs_of(case)] for case in (4, 5))
    assert [weight for _, weight in sorted(rising)] == [0.5, 0.8, 1.1, 1.4, 1.7, 2.0]
    assert falling[0][1] == 2.0
    assert falling[-1][1] == 0.5
