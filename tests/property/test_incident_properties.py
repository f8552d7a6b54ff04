"""Whatever order observations arrive in, and however often: the same failures are the same incidents."""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Scene

from unicron_lib.domain.actions import Dismiss, Respond, TripBreaker
from unicron_lib.domain.cluster import ClusterState, IncidentStatus, NodeStatus
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.journal import fold_all

HARDWARE = (ErrorKind.ECC_ERROR, ErrorKind.GPU_LOST, ErrorKind.NVLINK_ERROR, ErrorKind.NODE_LOST)
OF_RANKS = (ErrorKind.PROCESS_EXIT, ErrorKind.CONNECTION_RESET, ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT)


@dataclass(frozen=True)
class Seen:
    """Something to be told: of a rank of job a, or of a node."""

    kind: ErrorKind
    place: int
    symptom: bool = False


def cluster(num_nodes=8) -> Scene:
    scene = Scene()
    for number in range(num_nodes):
        scene.join(f"node-{number}")
    scene.submit("job-a", min_gpus=2, max_gpus=8, throughput_flops={x: x * 1e9 for x in (2, 4, 6, 8)}, max_restarts=1000)
    scene.submit("job-b", min_gpus=2, max_gpus=8, throughput_flops={x: x * 1e9 for x in (2, 4, 6, 8)}, max_restarts=1000)
    scene.settle()
    return scene


START = cluster()
seen = st.one_of(
    st.builds(Seen, kind=st.sampled_from(HARDWARE), place=st.integers(0, 7)),
    st.builds(Seen, kind=st.just(ErrorKind.OTHER), place=st.integers(0, 7), symptom=st.just(True)),
    st.builds(Seen, kind=st.just(ErrorKind.LINK_FLAPPING), place=st.integers(0, 7), symptom=st.booleans()),
    st.builds(Seen, kind=st.sampled_from(OF_RANKS), place=st.integers(0, 7)),
)


def failure_of(number: int, it: Seen) -> Failure:
    """The same failure at the same time whenever it is told."""
    told = Failure(
        id=f"seen-{number}", kind=it.kind, method=DetectionMethod.PROCESS, seen_at=START.now + number, symptom=it.symptom
    )
    if it.kind in OF_RANKS:
        job = START.state.jobs["job-a"]
        node = job.assignment.slots[it.place].node
        return replace(told, job="job-a", generation=job.generation, rank=it.place, node=node, iteration=7)
    node = f"node-{it.place}"
    return replace(told, node=node, boot=START.state.nodes[node].boot)


def told(failures) -> ClusterState:
    """The state after `failures` within an instant; the journal takes each id once."""
    scene = replace(START, events=list(START.events))
    at = START.now + 100
    for failure in {failure.id: failure for failure in failures}.values():
        scene.tell(FailureDetected(id=failure.id, at=at, failure=failure))
    return scene.state


def whole(state):
    return [it for it in state.incidents.values() if it.is_failure and it.status is not IncidentStatus.MERGED]


@given(data=st.data(), what=st.lists(seen, max_size=10))
def test_every_failure_is_counted_in_exactly_one_incident(data, what):
    failures = [failure_of(number, it) for number, it in enumerate(what)]
    state = told(data.draw(st.permutations(failures + failures[:3])))
    holders = Counter(failure.id for it in whole(state) for failure in it.failures)
    assert set(holders.values()) <= {1}
    assert sum(it.count for it in whole(state)) == len(failures)


@given(data=st.data(), what=st.lists(seen, max_size=8))
def test_the_order_of_arrival_changes_neither_what_is_isolated_nor_what_is_lost(data, what):
    failures = [failure_of(number, it) for number, it in enumerate(what)]
    one, other = told(failures), told(data.draw(st.permutations(failures)))
    assert {n.id: n.status for n in one.nodes.values()} == {n.id: n.status for n in other.nodes.values()}
    assert hardware_roots(one) == hardware_roots(other)


def hardware_roots(state):
    """Nodes that an incident names for their hardware, unless they are lost altogether."""
    roots = (it.root for it in whole(state))
    nodes = (root.node for root in roots if root.job is None and not root.symptom and root.kind is not ErrorKind.LINK_FLAPPING)
    return {node for node in nodes if state.nodes[node].status is not NodeStatus.LOST}


@given(what=st.lists(seen, max_size=8), skews_s=st.lists(st.floats(-7200, 7200), min_size=8, max_size=8))
def test_clocks_of_nodes_that_differ_change_no_root_cause(what, skews_s):
    nodes = {f"node-{number}": skew_s for number, skew_s in enumerate(skews_s)}
    failures = [failure_of(number, it) for number, it in enumerate(what)]
    skewed = [replace(failure, seen_at=failure.seen_at + nodes[failure.node]) for failure in failures]
    assert roots(told(skewed)) == roots(told(failures))


def roots(state):
    return {it.root.id for it in whole(state)}


def answered(failures) -> Scene:
    """The end of it all when each failure arrives while the ones before it may be being answered."""
    scene = replace(START, events=list(START.events))
    for number, failure in enumerate(failures):
        scene.now += 0.4
        scene.tell(FailureDetected(id=failure.id, at=scene.now, failure=failure))
        match scene.decide():
            case Respond() as respond if number % 2:
                scene.plan(respond)
            case Dismiss() | TripBreaker() as action:
                scene.note(action)
    scene.settle()
    return scene


@settings(max_examples=60, deadline=None)
@given(data=st.data(), what=st.lists(seen, min_size=1, max_size=12))
def test_each_incident_is_answered_once_or_dismissed_and_symptoms_isolate_nobody(data, what):
    failures = data.draw(st.permutations([failure_of(number, it) for number, it in enumerate(what)]))
    state = answered(failures).state
    for it in whole(state):
        assert it.status is IncidentStatus.CLOSED
        done = [p for p in state.plans.values() if p.finished_at is not None and it.id in p.plan.incidents]
        assert len(done) == (it.plan is not None)
        assert it.plan is not None or it.is_of_nodes
    isolated = {node.id for node in state.nodes.values() if node.status is NodeStatus.QUARANTINED}
    assert isolated <= {failure.node for failure in failures if failure.kind in HARDWARE}
    assert len(isolated) <= len(state.nodes) / 2


@settings(max_examples=40, deadline=None)
@given(what=st.lists(seen, min_size=1, max_size=12))
def test_a_restarted_controller_comes_to_the_same_state(what):
    scene = answered([failure_of(number, it) for number, it in enumerate(what)])
    assert fold_all(scene.events) == scene.state


@settings(max_examples=15, deadline=None)
@given(moves=st.lists(st.sampled_from(sorted(START.state.nodes)), min_size=1, max_size=6))
def test_lost_and_regained_nodes_never_use_up_a_budget(moves):
    scene = replace(START, events=list(START.events))
    for node in moves:
        scene.lose(node)
        scene.settle()
        scene.join(node)
        scene.settle()
    assert all((job.failed_times, job.stuck_restarts) == ((), 0) for job in scene.state.jobs.values())
