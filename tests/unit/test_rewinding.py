"""An anomaly of the loss makes its job go back and leave batches out, once; the second time at the same place ends it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scenes import running_pair

from unicron_lib.domain.actions import Respond, Wait
from unicron_lib.domain.events import LossSpiked
from unicron_lib.domain.failures import DetectionMethod, ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import PlanKind, Rewind
from unicron_lib.domain.skipping import batch_of, leaving_out, places, told
from unicron_lib.journal import dump_state
from unicron_lib.report import incident_markdown

ANOMALY = ErrorKind.LOSS_ANOMALY


def harm(scene, first, last, *, rank=0, reached=None):
    method = DetectionMethod.STATISTICS if reached else DetectionMethod.EXCEPTION
    iteration = first - 1 if reached is None else reached
    return scene.fail(ANOMALY, "gpt-a", rank, iteration=iteration, spoiled=(first, last), method=method)


def test_a_nan_takes_the_job_back_without_its_batch():
    scene = running_pair()
    before = scene.state.jobs["gpt-b"]
    for rank in range(4):
        harm(scene, 42, 42, rank=rank)
    respond = scene.decide()
    assert respond.kind is PlanKind.REATTEMPT
    assert respond.rewinds == {"gpt-a": Rewind(first=42, last=42)}
    assert "back to a checkpoint from before iteration 42" in respond.reason
    assert "(batches 42) is left out" in respond.reason
    plan = scene.plan(respond)
    job = scene.state.jobs["gpt-a"]
    assert (job.skipped, job.rolled_back_to) == (((42, 42),), 41)
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert (job.status, job.skipped, job.rolled_back_to) == (JobStatus.RUNNING, ((42, 42),), None)
    assert scene.state.jobs["gpt-b"] == before
    assert "back to a checkpoint from before iteration 42" in incident_markdown(scene.state, plan.incidents[0])
    assert dump_state(scene.state)["plans"][plan.id]["plan"]["rewinds"] == {
        "gpt-a": {"first": 42, "last": 42, "repeats": False}
    }


def test_a_spike_that_did_not_pass_takes_it_back_to_where_it_began():
    scene = running_pair()
    harm(scene, 100, 107, reached=150)
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert (job.skipped, job.failed_at) == (((100, 107),), 99)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", iteration=120)
    assert scene.state.jobs["gpt-a"].stuck_restarts == 0, "from 99 to 120 is progress"


def test_a_second_anomaly_at_the_same_place_stops_the_job_with_a_clear_report():
    scene = running_pair()
    harm(scene, 42, 42)
    scene.settle()
    harm(scene, 44, 44)
    respond = scene.decide()
    assert set(respond.stop) == {"gpt-a"}
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert job.status is JobStatus.FAILED
    assert "a second time at the same place, in iteration 44, although the batches 42 are left out there" in job.reason
    assert "it is not the data" in job.reason
    assert scene.state.jobs["gpt-b"].status is JobStatus.RUNNING


def test_an_anomaly_elsewhere_is_answered_again():
    scene = running_pair()
    for first in (42, 142):
        harm(scene, first, first + 1)
        scene.settle()
    assert scene.state.jobs["gpt-a"].skipped == ((42, 43), (144, 145)), "iteration 142 had consumed batch 144"


def test_with_the_guard_off_nothing_is_left_out():
    scene = running_pair()
    scene.submit("free", loss_guard=False, must_run=True)
    scene.settle()
    if scene.state.jobs["free"].gpus == 0:
        pytest.fail("the job did not get GPUs")
    scene.fail(ANOMALY, "free", iteration=3, spoiled=(4, 4))
    respond = scene.decide()
    assert isinstance(respond, Respond)
    assert respond.rewinds == {}


@pytest.mark.parametrize("steps_done", range(5))
def test_a_plan_that_is_superseded_leaves_nothing_out_twice(steps_done):
    scene = running_pair()
    harm(scene, 42, 42)
    plan = scene.plan(scene.decide()).id
    for _ in range(steps_done):
        scene.step(plan)
    was_restored = scene.state.jobs["gpt-a"].rolled_back_to is None
    scene.lose(next(iter(scene.state.jobs["gpt-a"].nodes)))
    scene.now += 2.0
    respond = scene.decide()
    assert respond.supersedes == plan
    assert (respond.rewinds, respond.stop) == ({}, {})
    scene.plan(respond)
    job = scene.state.jobs["gpt-a"]
    assert (job.skipped, job.rolled_back_to) == (((42, 42),), None if was_restored else 41)


def test_another_failure_of_the_same_moment_does_not_hide_it():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1, iteration=41)
    harm(scene, 42, 42)
    scene.now += 2.0
    assert scene.decide().rewinds == {"gpt-a": Rewind(first=42, last=42)}


def doubt(scene, kind=ErrorKind.CUDA_ERROR, rank=0, **keys):
    return scene.fail(kind, "gpt-a", rank, iteration=39, spoiled=(40, 49), **keys)


def test_wrong_results_are_computed_again_from_the_same_batches_without_the_node_that_did_it():
    scene = running_pair()
    for rank in (0, 1, 3):
        doubt(scene, ErrorKind.NCCL_REMOTE_ERROR, rank)
    assert isinstance(scene.decide(), Wait), "its own word is waited for"
    culprit = doubt(scene, rank=2, verdict="exclude")
    respond = scene.decide()
    assert respond.kind is PlanKind.REALLOCATE
    assert set(respond.quarantine) == {culprit.node}
    assert respond.rewinds == {"gpt-a": Rewind(first=40, last=49, repeats=True)}
    assert "the process asks for it" in respond.reason
    assert "back to a checkpoint from before iteration 40" in respond.reason
    assert "computed again" in respond.reason
    scene.plan(respond)
    job = scene.state.jobs["gpt-a"]
    assert (job.skipped, job.rolled_back_to) == ((), 39)
    scene.settle()
    assert culprit.node not in scene.state.jobs["gpt-a"].nodes


def test_if_nobody_knows_who_is_wrong_nobody_is_isolated_until_it_happens_again():
    scene = running_pair()
    for rank in range(4):
        doubt(scene, rank=rank)
    respond = scene.decide()
    assert (respond.kind, respond.quarantine) == (PlanKind.RESTART, {})
    assert respond.rewinds == {"gpt-a": Rewind(first=40, last=49, repeats=True)}
    scene.settle()
    doubt(scene)
    again = scene.decide()
    assert again.kind is PlanKind.REALLOCATE, "that it came to the same check is no progress"
    assert "raised from SEV2" in again.reason
    assert again.rewinds == respond.rewinds
    scene.settle()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", iteration=44)
    assert scene.state.jobs["gpt-a"].stuck_restarts == 0, "from 39 to 44 is"


def test_what_a_waiting_peer_knows_takes_the_job_back_although_the_culprit_said_nothing():
    scene = running_pair()
    doubt(scene, ErrorKind.NCCL_REMOTE_ERROR)
    scene.now += 2.0
    assert scene.decide().rewinds == {"gpt-a": Rewind(first=40, last=49, repeats=True)}


def test_no_batch_is_to_blame_for_a_loss_that_was_computed_wrongly():
    scene = running_pair()
    harm(scene, 47, 47)
    doubt(scene, rank=1, verdict="exclude")
    assert scene.decide().rewinds == {"gpt-a": Rewind(first=40, last=49, repeats=True)}


def test_a_rewind_of_an_older_journal_leaves_its_batches_out():
    assert TypeAdapter(Rewind).validate_json('{"first": 3, "last": 4}') == Rewind(first=3, last=4, repeats=False)


def test_a_job_that_goes_on_from_its_checkpoint_goes_on_without_the_batches():
    scene = running_pair()
    harm(scene, 42, 42)
    scene.settle()
    scene.finish("gpt-a")
    scene.submit("gpt-a", load="latest")
    assert scene.state.jobs["gpt-a"].skipped == ((42, 42),)
    scene.settle()
    scene.finish("gpt-a")
    scene.submit("gpt-a")
    assert scene.state.jobs["gpt-a"].skipped == ()


def test_a_spike_is_shown_until_it_is_over():
    scene = running_pair()
    generation = scene.state.jobs["gpt-a"].generation
    keys = {"job": "gpt-a", "generation": generation, "iteration": 9, "reason": "2.2 to 5.1"}
    scene.tell(LossSpiked(id="s1", at=scene.now, **keys))
    assert scene.state.jobs["gpt-a"].loss_spike == "2.2 to 5.1"
    scene.tell(LossSpiked(id="s2", at=scene.now, over=True, **keys))
    assert scene.state.jobs["gpt-a"].loss_spike == ""
    scene.tell(LossSpiked(id="s3", at=scene.now, **keys | {"generation": generation - 1}))
    assert scene.state.jobs["gpt-a"].loss_spike == ""


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=6)


@given(spans)
def test_leaving_out_takes_away_exactly_what_those_iterations_consumed(taken):
    order, skipped = list(range(300)), ()
    for first, more in taken:
        skipped = leaving_out(skipped, first=first, last=first + more)
        del order[first : first + more + 1]
    assert [batch_of(iteration, skipped) for iteration in range(len(order))] == order
    assert all(a[1] < b[0] for a, b in pairwise(skipped))
    for place, (first, last) in zip(places(skipped), skipped, strict=True):
        assert place == first - sum(end - start + 1 for start, end in skipped if end < first)
        assert batch_of(place, skipped) > last


def test_ranges_are_told_in_words():
    assert told(((41, 45), (97, 97))) == "41-45, 97"


def test_a_job_that_was_moved_before_its_harm_was_answered_goes_back_all_the_same():
    """The move was decided in the same moment: it has drained the job behind the harm, and goes on from there."""
    scene = running_pair()
    harm(scene, 100, 107, reached=150)
    (incident,) = scene.state.open_incidents
    scene.join("node-5")
    (joined,) = (it for it in scene.state.open_incidents if it.id != incident.id)
    before = scene.state.jobs["gpt-a"].generation
    scene.plan(Respond(kind=PlanKind.REALLOCATE, incidents=(joined.id,), attempt=1, reason="a node joins", faulted=()))
    assert scene.state.jobs["gpt-a"].generation > before
    assert scene.state.jobs["gpt-a"].rolled_back_to is None
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert (job.skipped, job.failed_at) == (((100, 107),), 99)
    scene.settle()
    assert scene.state.jobs["gpt-a"].skipped == ((100, 107),), "once is enough"
