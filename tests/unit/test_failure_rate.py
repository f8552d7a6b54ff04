"""The observed MTBF: what counts as a failure, and for how long the cluster was watched."""

from dataclasses import replace

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.planning.failure_rate import causes_replanning, observed_gpu_s, observed_mtbf_gpu_s

PRIOR = 6.2e7


def watched(scene: Scene) -> float:
    return observed_mtbf_gpu_s(scene.state, prior_mtbf_gpu_s=PRIOR)


def test_a_young_cluster_has_the_prior() -> None:
    assert watched(Scene()) == PRIOR
    assert watched(running_pair()) == pytest.approx(PRIOR, rel=1e-5)


def test_quiet_time_raises_it_and_the_first_loss_halves_it() -> None:
    scene = running_pair()
    scene.now += 1e7
    scene.join("node-5", num_gpus=2)
    quiet = watched(scene)
    assert quiet == pytest.approx(PRIOR + 8e7, rel=1e-5)
    scene.lose("node-1")
    scene.settle()
    assert watched(scene) == pytest.approx(quiet / 2, rel=1e-4)


def test_only_failures_that_shared_the_gpus_out_anew_count() -> None:
    scene = running_pair()
    scene.fail(ErrorKind.CUDA_ERROR, "gpt-a")
    scene.settle()
    assert [i.kind for i in scene.state.incidents.values() if i.is_failure] == ["cuda_error"]
    assert watched(scene) == pytest.approx(PRIOR, rel=1e-5)
    scene.finish("gpt-b")
    scene.settle()
    assert watched(scene) == pytest.approx(PRIOR, rel=1e-5)


def test_an_injected_fault_does_not_count() -> None:
    scene = running_pair()
    scene.lose("node-1")
    scene.settle()
    (lost,) = (i for i in scene.state.incidents.values() if i.is_failure)
    assert causes_replanning(scene.state, lost)
    drill = replace(lost, fault_at=lost.opened_at)
    assert not causes_replanning(scene.state.with_incident(drill), drill)


def test_the_incident_in_planning_counts_already() -> None:
    scene = running_pair()
    scene.lose("node-1")
    (lost,) = (i for i in scene.state.incidents.values() if i.is_failure)
    assert not causes_replanning(scene.state, lost)
    assert observed_mtbf_gpu_s(scene.state, prior_mtbf_gpu_s=PRIOR, planning={lost.id}) == pytest.approx(PRIOR / 2, rel=1e-5)


def test_a_lost_node_is_watched_no_longer() -> None:
    scene = running_pair()
    scene.lose("node-1")
    scene.settle()
    before = observed_gpu_s(scene.state)
    begun = max(plan.decided_at for plan in scene.state.plans.values())
    scene.now += 1000.0
    scene.fail(ErrorKind.CUDA_ERROR, "gpt-a")
    assert observed_gpu_s(scene.state) - before == pytest.approx(6 * (scene.now - begun), abs=20.0)
