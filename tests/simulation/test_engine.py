"""The engine: what is announced happens, what is replaced does not, what is impossible is told as a story."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import pytest
from simulated import CLUSTER, JOBS, Fixed, FixedRun, fault, job, trace

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation.engine import Violation, simulate
from unicron_lib.simulation.generators import trace_b
from unicron_lib.simulation.policy import Answer, Change, Event, FaultStruck, JobArrived, JobDone, NodeBack, Wake, Woken
from unicron_lib.simulation.unicron import Unicron
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

HANG, ECC = ErrorKind.TASK_HANG, ErrorKind.ECC_ERROR


@dataclass(frozen=True)
class Scripted:
    """A policy whose run is given: what it says at the beginning, and of each event."""

    first: Sequence[Change | Wake] = ()
    says: Callable[[Event, float], Answer] = lambda _, __: ()
    name: str = "scripted"
    fitted: tuple[str, ...] = ()

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "Scripted":
        return self

    def begin(self) -> Answer:
        return self.first

    def on(self, event: Event, now_s: float) -> Answer:
        return self.says(event, now_s)


def trains(name: str, gpus: int, at_s: float = 0.0) -> Change:
    return Change(job=name, gpus=gpus, from_s=at_s, flops=1e12 * gpus)


def intervals(segments: Sequence, name: str) -> list[tuple[float, float, Use]]:
    return [(s.from_s, s.until_s, s.use) for s in segments if s.job == name]


def test_a_fault_stops_its_job_for_as_long_as_the_policy_says() -> None:
    found = simulate(Fixed(), trace(fault(1000.0, HANG), duration_s=2000.0), CLUSTER, JOBS)
    stands = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
    assert len(found.faults) == 1
    assert intervals(found.segments, "a") == [
        (0.0, 1000.0, Use.TRAINING),
        (1000.0, 1100.0, stands),
        (1100.0, 2000.0, Use.TRAINING),
    ]
    assert intervals(found.segments, "b") == [(0.0, 2000.0, Use.TRAINING)]


def test_a_later_word_replaces_what_was_announced() -> None:
    """The second fault comes before the job would have gone on."""
    found = simulate(Fixed(), trace(fault(1000.0, HANG), fault(1050.0, HANG), duration_s=2000.0), CLUSTER, JOBS)
    resumed = [segment.from_s for segment in found.segments if segment.job == "a" and segment.use is Use.TRAINING]
    assert resumed == [0.0, 1150.0]


def test_a_broken_node_is_out_of_use_until_it_is_repaired() -> None:
    found = simulate(Fixed(), trace(fault(100.0, ECC, repair_s=300.0), duration_s=1000.0), CLUSTER, JOBS)
    (away,) = [segment for segment in found.segments if segment.use is Use.OUT_OF_USE]
    assert (away.from_s, away.until_s, away.gpus) == (100.0, 400.0, 8)
    assert away.cause in found.faults


def test_a_repair_that_outlasts_the_trace_counts_until_its_end() -> None:
    found = simulate(Fixed(), trace(fault(100.0, ECC, repair_s=1e9), duration_s=1000.0), CLUSTER, JOBS)
    assert [s.until_s for s in found.segments if s.use is Use.OUT_OF_USE] == [1000.0]


def test_what_strikes_a_node_that_is_away_is_missed() -> None:
    found = simulate(Fixed(), trace(fault(100.0, ECC, repair_s=300.0), fault(200.0, HANG)), CLUSTER, JOBS)
    assert (len(found.faults), found.missed) == (1, 1)


def test_a_job_ends_when_its_work_is_done() -> None:
    told: list[tuple[Event, float]] = []
    finite = job("a", work_flop=8e12 * 500.0)

    def says(event: Event, now_s: float) -> Iterator[Change]:
        told.append((event, now_s))
        if isinstance(event, FaultStruck):
            yield Change(job="a", gpus=8, from_s=now_s, flops=0.0, use=Use.OTHER)
            yield trains("a", 8, now_s + 50.0)

    found = simulate(Scripted([trains("a", 8)], says), trace(fault(100.0, HANG)), CLUSTER, [finite])
    assert told[-1] == (JobDone(job="a"), pytest.approx(550.0))
    assert sum(segment.flop for segment in found.segments) == pytest.approx(finite.work_flop)
    assert max(segment.until_s for segment in found.segments) == pytest.approx(550.0)


def test_events_come_in_the_order_of_time() -> None:
    told: list[tuple[type[Event], float]] = []

    def says(event: Event, now_s: float) -> Answer:
        told.append((type(event), now_s))
        return [Wake(at_s=now_s + 7.0)] if isinstance(event, JobArrived) else ()

    late = job("late", arrives_s=50.0)
    simulate(Scripted((), says), trace(fault(10.0, ECC, node=3, repair_s=60.0)), CLUSTER, [late])
    assert told == [(FaultStruck, 10.0), (JobArrived, 50.0), (Woken, 57.0), (NodeBack, 70.0)]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ([trains("a", 24), Change(job="b", gpus=16, from_s=0.0, flops=0.0)], "40 GPUs are held, 32 are healthy"),
        ([trains("nobody", 8)], "there is no job nobody"),
        ([Change(job="a", gpus=4, from_s=0.0, flops=0.0)], "fewer GPUs than it can"),
        ([Change(job="a", gpus=8, from_s=0.0, flops=9e12)], "faster than it can be"),
        ([Change(job="a", gpus=8, from_s=0.0, flops=-1.0)], "faster than it can be"),
        ([Change(job="a", gpus=8, from_s=-1.0, flops=0.0)], "which is past"),
    ],
)
def test_the_impossible_is_refused_with_the_story(said: list[Change], sentence: str) -> None:
    with pytest.raises(Violation, match=sentence) as caught:
        simulate(Scripted(said), trace(), CLUSTER, JOBS)
    assert "by hand (a test)" in str(caught.value)


def test_gpus_of_a_node_that_is_away_cannot_be_held() -> None:
    """The policy does not even notice the fault: 24 healthy GPUs are left of 32."""
    first = [trains("a", 24), trains("b", 8)]
    with pytest.raises(Violation, match=r"(?s)32 GPUs are held, 24 are healthy.*FaultStruck"):
        simulate(Scripted(first), trace(fault(100.0, ECC, repair_s=1.0)), CLUSTER, JOBS)


def test_a_job_holds_nothing_before_it_arrives() -> None:
    with pytest.raises(Violation, match="before it arrives"):
        simulate(Scripted([trains("a", 8)]), trace(), CLUSTER, [job("a", arrives_s=5.0)])


def test_a_fault_on_a_node_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="a fault on node 4, the cluster has 4 nodes"):
        simulate(Fixed(), trace(fault(1.0, HANG, node=4)), CLUSTER, JOBS)


def test_the_same_run_twice_is_the_same_to_the_last_bit() -> None:
    runs = [simulate(Unicron(), trace_b(7, num_nodes=4), CLUSTER, JOBS) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].faults


def test_a_job_without_an_end_never_ends() -> None:
    found = simulate(Scripted([trains("a", 8)]), trace(duration_s=1e9), CLUSTER, [job("a", work_flop=inf)])
    assert found.segments[-1].until_s == 1e9


def test_the_fixed_policy_is_told_of_all_that_it_needs() -> None:
    run = FixedRun(JOBS)
    assert {change.job for change in run.begin()} == {"a", "b"}
