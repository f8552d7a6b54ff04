"""The restart budget: so many failures of a job's own within a window, whatever progress it makes in between."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.events import JobSubmitted
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec, JobStatus


def crash(scene, times, *, every_s=20.0, kind=ErrorKind.PROCESS_EXIT):
    """Crashes with progress in between, each answered."""
    for _ in range(times):
        scene.now += every_s
        scene.fail(kind, "gpt-a")
        scene.settle()


def test_a_job_that_fails_too_often_is_stopped_though_it_makes_progress():
    scene = running_pair()
    crash(scene, 3)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING
    crash(scene, 1)
    job = scene.state.jobs["gpt-a"]
    assert job.status is JobStatus.FAILED
    assert "4 failures within 600 s, max_restarts is 3" in job.reason
    assert scene.state.jobs["gpt-b"].status is JobStatus.RUNNING


def test_failures_that_are_far_apart_are_answered_for_ever():
    scene = running_pair()
    crash(scene, 12, every_s=201.0)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING


@pytest.mark.parametrize(("keys", "times"), [({"restart_window_s": 0.0}, 12), ({"max_restarts": 12}, 12)])
def test_the_limit_is_the_jobs_own(keys, times):
    scene = Scene()
    for number in range(1, 5):
        scene.join(f"node-{number}")
    scene.submit("gpt-a", **keys)
    scene.settle()
    crash(scene, times, every_s=1.0)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING


def test_moves_that_a_plan_wants_and_lost_nodes_never_count():
    """PB21: max_restarts 2, moved five times since other jobs lose and regain nodes, and hit by two lost nodes itself."""
    scene = Scene()
    for number in range(1, 5):
        scene.join(f"node-{number}")
    scene.submit("gpt-a", weight=2.0, max_gpus=8, max_restarts=2)
    scene.submit("gpt-b", max_gpus=4, throughput_flops={2: 0.5e9, 4: 0.9e9})
    scene.settle()
    generation = scene.state.jobs["gpt-a"].generation
    for _ in range(5):
        node = min(scene.state.jobs["gpt-a"].nodes)
        scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a", iteration=3)
        scene.lose(node)
        scene.settle()
        scene.join(node)
        scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert job.generation >= generation + 5, "it was moved"
    assert (job.failed_times, job.stuck_restarts, job.status) == ((), 0, JobStatus.RUNNING)
    crash(scene, 2)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING
    crash(scene, 1)
    assert scene.state.jobs["gpt-a"].status is JobStatus.FAILED


def test_being_preempted_never_counts():
    scene = running_pair()
    crash(scene, 8, kind=ErrorKind.PREEMPTED)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING


def test_a_plan_that_is_made_anew_counts_its_failures_once():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    first = scene.plan(scene.decide())
    scene.step(first.id)
    scene.lose(min(scene.state.jobs["gpt-a"].nodes))
    again = scene.decide()
    assert isinstance(again, Respond)
    assert again.supersedes == first.id
    scene.plan(again)
    assert len(scene.state.jobs["gpt-a"].failed_times) == 1


def test_a_new_submission_begins_with_a_full_budget():
    scene = running_pair()
    crash(scene, 4)
    assert scene.state.jobs["gpt-a"].status is JobStatus.FAILED
    spec: JobSpec = scene.state.jobs["gpt-a"].spec
    scene.tell(JobSubmitted(id="again", at=scene.now, submission="again", spec=spec))
    scene.settle()
    crash(scene, 3)
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING


def test_what_is_remembered_is_bounded():
    scene = running_pair()
    crash(scene, 12, every_s=201.0)
    assert len(scene.state.jobs["gpt-a"].failed_times) <= 3
