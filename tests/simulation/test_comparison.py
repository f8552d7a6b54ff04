"""Policies side by side: means and intervals, runs below another policy, what is printed and drawn of them."""

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import CLUSTER, JOBS, Fixed, fault, job, trace

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.simulation import pictures, report, svg
from unicron_lib.simulation.accounting import of_outcome
from unicron_lib.simulation.comparison import NOTHING, Comparison, compare, mean_of
from unicron_lib.simulation.engine import simulate
from unicron_lib.simulation.faults import Trace
from unicron_lib.simulation.policy import Answer, Change, Event
from unicron_lib.simulation.scenes import Scene
from unicron_lib.simulation.unicron import Unicron
from unicron_lib.simulation.workload import SimCluster, SimJob
from unicron_lib.simulation.workloads import Workload

NAMESPACE = "{http://www.w3.org/2000/svg}"
LOST = fault(2_000.0, ErrorKind.ECC_ERROR, node=0, repair_s=3_000.0)
HUNG = fault(6_000.0, ErrorKind.TASK_HANG, node=1)


@dataclass(frozen=True)
class Slow:
    """As Fixed at a share of the speed, whatever happens; 0.0 earns nothing."""

    share: float
    name: str = "slow"
    fitted: tuple[str, ...] = ("its share",)

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "SlowRun":
        return SlowRun(self.share, jobs)


class SlowRun:
    def __init__(self, share: float, jobs: Sequence[SimJob]) -> None:
        self.share, self.jobs = share, jobs

    def begin(self) -> Answer:
        # on nodes 2 and 3, which nothing strikes
        return [Change(job=job.job, gpus=8, from_s=0.0, flops=8e12 * self.share) for job in self.jobs]

    def on(self, event: Event, now_s: float) -> Iterator[Change]:
        return iter(())


TRACES: Mapping[int, Trace] = {
    0: trace(LOST, HUNG),
    1: trace(replace(LOST, at_s=1_000.0)),
    2: trace(HUNG),
}


def compared(
    *policies: object, traces: Mapping[int, Trace] = TRACES, reference: str = "fixed", published: Mapping[str, float] = NOTHING
) -> Comparison:
    return compare(policies, traces, CLUSTER, JOBS, reference=reference, published=published)


# means


@pytest.mark.parametrize(
    ("number", "quantile"), [(2, 12.706), (5, 2.776), (10, 2.262), (11, 2.228), (31, 2.042), (1001, 1.962)]
)
def test_the_interval_is_students(number: int, quantile: float) -> None:
    values = [float(n) for n in range(number)]
    found = mean_of(values)
    deviation = math.sqrt(number * (number + 1) / 12)  # of 0 .. n-1, with n - 1 degrees of freedom
    assert found.high is not None
    assert found.high - found.mean == pytest.approx(quantile * deviation / math.sqrt(number), rel=0.002)


def test_one_seed_has_no_interval() -> None:
    found = mean_of([3.0])
    assert (found.mean, found.low, found.high) == (3.0, None, None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_a_mean_is_in_the_middle_of_its_interval(values: list[float]) -> None:
    found = mean_of(values)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.mean <= found.high
    assert found.mean - found.low == pytest.approx(found.high - found.mean, abs=1e-6)


# comparisons


def test_each_policy_runs_on_the_trace_of_each_seed() -> None:
    calls = []
    found = compare([Fixed(), Slow(0.5)], TRACES, CLUSTER, JOBS, reference="fixed", done=lambda: calls.append(1))
    assert len(calls) == 6
    for policy in (Fixed(), Slow(0.5)):
        for seed, made in TRACES.items():
            alone = of_outcome(simulate(policy, made, CLUSTER, JOBS))
            assert found.results[policy.name].books[seed].accumulated_waf == alone.accumulated_waf


def test_ratios_are_taken_seed_by_seed() -> None:
    found = compared(Fixed(), Slow(0.5))
    own, other = (found.results[name].books for name in ("fixed", "slow"))
    ratios = [own[seed].accumulated_waf / other[seed].accumulated_waf for seed in TRACES]
    assert len({round(ratio, 6) for ratio in ratios}) == 3
    times, ratio = found.times("slow"), found.ratio("slow")
    assert times is not None
    assert ratio is not None
    assert times.mean == pytest.approx(sum(ratios) / 3)
    assert ratio.mean == pytest.approx(sum(1 / it for it in ratios) / 3)
    assert found.times("fixed") == mean_of([1.0, 1.0, 1.0])


def test_a_policy_that_earned_nothing_has_no_ratio_to_it() -> None:
    found = compared(Fixed(), Slow(0.0))
    ratio = found.ratio("slow")
    assert found.times("slow") is None
    assert ratio is not None
    assert ratio.mean == 0.0


def test_each_run_below_another_policy_is_listed_with_what_differs() -> None:
    """Slow at full speed is struck by nothing, so Fixed is below it wherever a fault cost it something."""
    found = compared(Fixed(), Slow(1.0))
    below = found.below()
    assert [(run.policy, run.seed) for run in below] == [("slow", 0), ("slow", 1), ("slow", 2)]
    first = below[0]
    deficit = 8e12 * (2.0 * 3_000.0 + 1.0 * 100.0)  # job a, of weight 2, waits for its node; job b restarts
    assert first.surplus_flop == pytest.approx(deficit)
    assert first.why.startswith("a does 42.86% more there; here there are")
    assert "out_of_use" not in first.why  # both have lost the node
    assert "GPU-hours more of" in first.why


def test_the_same_earnings_are_not_below() -> None:
    assert compared(Fixed(), Slow(1.0), traces={0: trace()}).below() == ()


# what is told of it


def reported(*policies: object) -> dict[str, object]:
    found = compared(*policies)
    workload = Workload(name="by hand", jobs=JOBS)
    scene = Scene(cluster=CLUSTER, workload=workload, traces=TRACES, policies=policies, reference="fixed", fitted=("a trace",))
    return report.as_json(scene, found, command="again")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_report_is_json_without_infinities_and_its_gpu_hours_add_up(share: float) -> None:
    answer = json.loads(json.dumps(reported(Fixed(), Slow(share)), allow_nan=False))
    hours = CLUSTER.num_gpus * 10_000.0 / 3600
    for it in answer["policies"].values():
        assert sum(it["gpu_h"].values()) == pytest.approx(hours)
        assert it["goodput"] == pytest.approx(it["gpu_h"].get("training", 0.0) / hours)
        assert it["dollars"] == pytest.approx(hours * CLUSTER.gpu_dollars_h)
        assert set(it["jobs"]) == {"a", "b"}
        assert sum(job["accumulated_waf"] for job in it["jobs"].values()) == pytest.approx(it["accumulated_waf"])
    assert answer["policies"]["slow"]["fitted"] == ["its share"]
    assert answer["fitted"] == ["a trace"]
    assert (answer["policies"]["slow"]["unicron_is_times"] is None) == (share == 0.0)
    assert len(answer["below"]) == (3 if share == 1.0 else 0)


# pictures


def shapes(text: str, kind: str) -> list[ET.Element]:
    return list(ET.fromstring(text).iter(f"{NAMESPACE}{kind}"))


def test_a_picture_has_a_curve_a_policy_a_mark_a_fault_and_a_row_a_job() -> None:
    found = compared(Fixed(), Slow(0.5))
    text = pictures.draw(found)
    assert len(shapes(text, "polyline")) == 2
    marks = [line.get("stroke") for line in shapes(text, "line")]
    assert marks.count(pictures.GRAVE) == 1
    assert marks.count(pictures.LIGHT) == 1
    words = [it.text or "" for it in shapes(text, "text")]
    assert {"fixed", "slow"} <= set(words)
    assert {"a (8)", "b (8)", "nodes away"} <= set(words)


def test_nothing_is_drawn_outside_the_picture() -> None:
    text = pictures.draw(compared(Fixed(), Slow(0.5)))
    height = float(ET.fromstring(text).attrib["viewBox"].split()[3])
    for group in shapes(text, "g"):
        top = float(group.attrib["transform"].split()[1].rstrip(")"))
        for it in group.iter(f"{NAMESPACE}rect"):
            x, y, wide, high = (float(it.attrib[key]) for key in ("x", "y", "width", "height"))
            assert x >= 0
            assert x + wide <= svg.WIDTH + 0.6
            assert top + y >= 0
            assert top + y + high <= height


def test_published_ratios_are_marked_on_the_bars() -> None:
    text = pictures.draw(compared(Fixed(), Slow(0.5), traces={0: TRACES[0]}, published={"slow": 9.0, "other": 2.0}))
    marks = [line.get("stroke") for line in shapes(text, "line")]
    assert marks.count(pictures.GRAVE) == 2  # the lost node, and what is published


def test_of_many_policies_the_curves_of_the_papers_are_drawn() -> None:
    names = ("x1", "x2", "x3", "megatron", "varuna", "x4")
    found = compared(Fixed(), *(Slow(0.5, name=name) for name in names))
    assert pictures.drawn(found)[:3] == ["fixed", "megatron", "varuna"]
    assert len(pictures.drawn(found)) == 5


def test_a_name_cannot_break_the_picture() -> None:
    odd = job('<a href="x">&\x00', sizes=(8,))
    found = compare([Fixed()], {0: trace()}, CLUSTER, [odd], reference="fixed")
    assert any("<a href=" in (it.text or "") for it in shapes(pictures.draw(found), "text"))


@given(st.lists(st.tuples(st.floats(0, 999), st.floats(0, 1e3)), min_size=1, max_size=50))
def test_a_thinned_curve_keeps_the_area_below_it(turns: list[tuple[float, float]]) -> None:
    ordered = sorted(dict(turns).items())
    ends = [*(at_s for at_s, _ in ordered[1:]), 1_000.0]
    area = sum(level * (until - since) for (since, level), until in zip(ordered, ends, strict=True))
    points = pictures._means(ordered, 1_000.0)
    assert sum(level for _, level in points) * 1_000.0 / len(points) == pytest.approx(area, rel=1e-6, abs=1e-6)


def test_the_gantt_shows_that_a_job_stands_still() -> None:
    found = compared(Unicron(), traces={0: trace(HUNG)}, reference="unicron")
    colours = [it.get("fill") for it in shapes(pictures.draw(found), "rect")]
    assert pictures.STANDING in colours
    assert pictures.AT_WORK in colours
