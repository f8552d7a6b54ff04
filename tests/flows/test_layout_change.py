"""A job changes its layout: no rank lives on, and what they have is saved as the layout has it that they ran in."""

import pytest
from fake_site import submit_anew

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout, StepKind

WHOLE = ParallelLayout(throughput_flops={2: 4.0e8})


async def submitted(site, way: ParallelLayout, monkeypatch) -> None:
    """The site's job anew, cut in one `way` on four GPUs and whole on two."""
    await submit_anew(site, JobSpec(job="gpt-a", min_gpus=2, parallel_layouts=(way, WHOLE)), monkeypatch)


@pytest.mark.parametrize(
    ("tp", "pp", "source", "saved_by"),
    [(2, 1, "replica of rank 0 at node-1", [1, 0]), (2, 2, "the newest checkpoint", [])],
)
async def test_survivors_save_if_they_have_all_parts(site, monkeypatch, tp, pp, source, saved_by) -> None:
    way = ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, throughput_flops={4: 9.0e8})
    await submitted(site, way, monkeypatch)
    before = site.journal.refresh().jobs["gpt-a"].assignment
    assert before.layout == Layout(tp=tp, pp=pp, dp=4 // (tp * pp))
    site.fail("f", ErrorKind.NODE_LOST, job=None, generation=None, rank=None, node="node-2", boot="b")
    await site.respond()
    state = site.journal.refresh()
    assert state.jobs["gpt-a"].assignment.layout == Layout(dp=2)
    plan = list(state.plans.values())[-1]
    results = {step.kind: plan.results[step.id] for step in plan.plan.steps}
    assert results[StepKind.DRAIN]["source"] == source
    assert [int(step.rpartition("-")[2]) for kind, step in site.agents.effects if kind == "save_replica"] == saved_by
    assert not [kind for kind, _ in site.agents.effects if kind == "hold_ranks"]
    assert site.agents.adopted == []
