"""Allocation and placement together: cuts go back until everything has a place."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from unicron_lib.domain.cluster import Node
from unicron_lib.planning.allocation import NotEnoughGpus, Request, allocate
from unicron_lib.planning.fitting import MAX_CUTS, Fitted, fit
from unicron_lib.planning.layout_choice import Layouts
from unicron_lib.planning.placement import CannotBePlaced, Placement, Rules, arrange
from unicron_lib.planning.waf import Demand

SHARE = partial(allocate, timer=time.perf_counter)


def nodes(*sizes: int) -> list[Node]:
    return [Node(id=f"n{i}", boot="b", address="x", num_gpus=size) for i, size in enumerate(sizes)]


def demand(job: str, *sizes: int, weight: float = 1.0, must_run: bool = False) -> Demand:
    return Demand(job=job, throughput_flops={size: 1e9 * size for size in sizes}, weight=weight, must_run=must_run)


def fitted(demands: tuple[Demand, ...], on: list[Node], groups: Mapping[str, int], limit: int | None = None) -> Fitted:
    request = Request(demands=demands, num_gpus=sum(node.num_gpus for node in on), mtbf_gpu_s=1e7)
    rules = Rules(group_gpus=groups, max_jobs_per_node=limit)
    return fit(request, share=SHARE, place=lambda gpus, _: arrange(gpus, {}, on, rules))


def test_what_fits_at_once_is_the_optimum() -> None:
    found = fitted((demand("a", 2, 4),), nodes(2, 2), {"a": 2})
    assert found.allocation.optimal
    assert found.notes == ()
    assert found.placement.certified


def test_a_size_without_a_place_is_cut_and_the_gap_is_told() -> None:
    found = fitted((demand("a", 4, 6), demand("b", 1)), nodes(3, 3), {"a": 2}, limit=2)
    assert found.allocation.gpus == {"a": 4, "b": 1}
    assert not found.allocation.optimal
    assert found.allocation.gap == pytest.approx(1 / 6)
    assert found.allocation.upper_bound >= found.allocation.gain
    assert found.notes == ("a cannot be placed: no node has room for it within the limits on 6 GPUs",)
    assert len(found.placement.slots["a"]) == 4


def test_a_job_for_which_nothing_is_found_waits_after_a_few_cuts() -> None:
    calls = 0

    def refuse(gpus: Mapping[str, int], _: Layouts) -> Placement:
        nonlocal calls
        calls += 1
        if gpus["a"]:
            raise CannotBePlaced("a cannot be placed", job="a", proved=True)
        return arrange(gpus, {}, nodes(8, 8))

    request = Request(demands=(demand("a", *range(1, 17)), demand("b", 4)), num_gpus=16, mtbf_gpu_s=1e7)
    found = fit(request, share=SHARE, place=refuse)
    assert found.allocation.gpus == {"a": 0, "b": 4}
    assert calls == MAX_CUTS + 2


def test_a_job_that_must_run_and_has_no_place_is_an_error_as_too_few_gpus_are() -> None:
    with pytest.raises(NotEnoughGpus, match="a must run"):
        fitted((demand("a", 4, must_run=True),), nodes(3, 3), {"a": 4})


def test_fewer_jobs_than_nodes_would_take_wait() -> None:
    found = fitted(tuple(demand(f"j{i}", 1, weight=1.0 + i) for i in range(3)), nodes(2, 2), {}, limit=1)
    assert sum(map(bool, found.allocation.gpus.values())) == 2
    assert not found.allocation.optimal


def test_racks_that_may_be_too_many_are_told() -> None:
    placement = arrange({"a": 2}, {}, nodes(2))
    request = Request(demands=(demand("a", 2),), num_gpus=2, mtbf_gpu_s=1e7)
    found = fit(request, share=SHARE, place=lambda *_: replace(placement, certified=False))
    assert found.notes == ("Another placement might span fewer racks",)
