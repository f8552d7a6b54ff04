"""The systems that Unicron is compared with: each does what is published of it, and no GPU appears or gets lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.simulation.allocation_rules import RULES, best
from unicron_lib.simulation.baselines import BASELINES, PAPER
from unicron_lib.simulation.elastic import by_size
from unicron_lib.simulation.engine import simulate
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.generators import trace_a, trace_b
from unicron_lib.simulation.megatron import with_spare_nodes
from unicron_lib.simulation.seats import Seats
from unicron_lib.simulation.shared_out import SharedOut
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

MINUTE_S, DAY_S = 60.0, 86400.0
CLUSTER = SimCluster(num_nodes=16)


def job(name, *, least=8, most=128, weight=1.0, num_params=7e9, **keys):
    table = {size: 1e14 * size**0.95 for size in range(least, most + 1, 8)}
    return SimJob(job=name, weight=weight, throughput_flops=table, num_params=num_params, **keys)


SIX = (
    job("a"),
    job("b", weight=2.0),
    job("c", num_params=13e9),
    job("d", num_params=1.3e9),
    job("e", num_params=1.3e9, weight=0.5),
    job("f", least=32, num_params=70e9),
)


def fault(kind, at_s=3600.0, node=0, repair_s=0.0):
    return Fault(at_s=at_s, kind=kind, node=node, repair_s=repair_s)


ONE = (job("gpt", most=16),)
TWO_NODES = SimCluster(num_nodes=2)


def played(policy, *faults, jobs=ONE, cluster=TWO_NODES, duration_s=DAY_S):
    outcome = simulate(policy, Trace(name="by hand", source="", duration_s=duration_s, faults=faults), cluster, jobs)
    assert len(outcome.faults) == len(faults)
    return outcome


def stands_s(outcome, name="gpt"):
    return sum(segment.duration_s for segment in outcome.segments if segment.job == name and not segment.flops)


def work(outcome):
    return sum(segment.flop for segment in outcome.segments)


@pytest.mark.parametrize(
    ("policy", "kind", "seconds"),
    [
        ("megatron", ErrorKind.NCCL_TIMEOUT, 68 * MINUTE_S),
        ("megatron", ErrorKind.CUDA_ERROR, 68 * MINUTE_S),
        ("megatron-shrink", ErrorKind.NCCL_TIMEOUT, 68 * MINUTE_S),
        ("checkpoint-only", ErrorKind.NCCL_TIMEOUT, (30 + 14 + 15) * MINUTE_S + 14 * 7e9 / 2e9),
        ("gemini", ErrorKind.NCCL_TIMEOUT, (30 + 14) * MINUTE_S + 14 * 7e9 / 5e9 + 5),
        ("oobleck", ErrorKind.NCCL_TIMEOUT, 30 * MINUTE_S + 10 * 7 / 6.7 + 5),
        ("bamboo", ErrorKind.NCCL_TIMEOUT, 30 * MINUTE_S + 450 * 7 / 6.7 + 5),
        ("varuna", ErrorKind.NCCL_TIMEOUT, 30 * MINUTE_S + 120 + 701 * 7 / 6.7 + 50),
    ],
)
def test_what_one_failure_costs(policy, kind, seconds):
    assert stands_s(played(BASELINES[policy], fault(kind))) == pytest.approx(seconds)


def test_megatron_waits_for_its_node():
    outcome = played(BASELINES["megatron"], fault(ErrorKind.NODE_LOST, repair_s=10 * 3600.0))
    assert stands_s(outcome) == pytest.approx(10 * 3600 + (14 + 15) * MINUTE_S)


def test_a_node_that_is_back_early_does_not_spare_the_submission():
    outcome = played(BASELINES["megatron"], fault(ErrorKind.ECC_ERROR, repair_s=60.0))
    assert stands_s(outcome) == pytest.approx(68 * MINUTE_S)


def test_two_lost_nodes_are_both_waited_for():
    faults = (fault(ErrorKind.NODE_LOST, repair_s=20 * 3600.0), fault(ErrorKind.NODE_LOST, 7200.0, 1, repair_s=3600.0))
    assert stands_s(played(BASELINES["megatron"], *faults)) == pytest.approx(20 * 3600 + 29 * MINUTE_S)


def test_who_shrinks_trains_on_what_is_left_and_grows_again():
    outcome = played(BASELINES["megatron-shrink"], fault(ErrorKind.NODE_LOST, repair_s=10 * 3600.0))
    trained = [(segment.gpus, segment.flops) for segment in outcome.segments if segment.flops]
    whole, half = (16, 1e14 * 16**0.95), (8, 1e14 * 8**0.95)
    assert trained == [pytest.approx(whole), pytest.approx(half), pytest.approx(whole)]
    # until the node is back the loss is charged to its fault
    assert [bool(segment.cause) for segment in outcome.segments if segment.flops] == [False, True, False]


def test_a_spare_node_stands_in():
    policy = with_spare_nodes(1, 8)
    outcome = played(policy, fault(ErrorKind.NODE_LOST, repair_s=10 * 3600.0), cluster=SimCluster(num_nodes=3))
    assert {segment.gpus for segment in outcome.segments if segment.job == "gpt"} == {16}
    assert stands_s(outcome) == pytest.approx(5.7 + (9 + 14 + 15) * MINUTE_S)


def test_too_few_gpus_are_waited_for_by_anyone():
    jobs = (job("gpt", least=16, most=16),)
    outcome = played(BASELINES["oobleck"], fault(ErrorKind.NODE_LOST, repair_s=3600.0), jobs=jobs)
    assert stands_s(outcome) == pytest.approx(3600 + 10 * 7 / 6.7 + 5)


def test_a_failure_elsewhere_touches_nobody():
    outcome = played(BASELINES["megatron"], fault(ErrorKind.NODE_LOST, node=2, repair_s=60.0), cluster=SimCluster(num_nodes=3))
    assert stands_s(outcome) == 0.0


def test_jobs_arrive_wait_and_end():
    first = job("first", most=8, least=8)
    size = first.flops(8)
    jobs = (
        job("first", least=8, most=8, work_flop=3600 * size),
        job("second", least=8, most=8, arrives_s=600.0, work_flop=60 * size),
    )
    outcome = played(BASELINES["megatron"], jobs=jobs, cluster=SimCluster(num_nodes=1))
    trained = [(segment.job, segment.from_s, segment.until_s) for segment in outcome.segments if segment.flops]
    assert trained == [("first", 0.0, pytest.approx(3600.0)), ("second", pytest.approx(3600.0), pytest.approx(3660.0))]


def test_reconfigurations_by_the_size_of_the_model():
    known = {2.7e9: 6.0, 6.7e9: 10.0}
    assert [by_size(known, params) for params in (2.7e9, 4.7e9, 6.7e9)] == [6.0, pytest.approx(8.0), 10.0]
    assert by_size(known, 1.35e9) == pytest.approx(3.0)
    assert by_size(known, 13.4e9) == pytest.approx(20.0)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("trace", [trace_a, trace_b], ids=["a", "b"])
def test_every_policy_lives_through_the_papers_traces(name, trace):
    policy = BASELINES[name]
    outcome = simulate(policy, trace(1), CLUSTER, SIX)
    again = simulate(policy, trace(1), CLUSTER, SIX)
    assert outcome == again
    assert outcome.policy == policy.name
    faultless = sum(entry.weight * entry.flops(gpus) for entry, gpus in zip(SIX, best(SIX, 128).values(), strict=True))
    weights = {entry.job: entry.weight for entry in SIX}
    waf = sum(weights[segment.job] * segment.flop for segment in outcome.segments if segment.job in weights)
    assert 0 < waf <= faultless * outcome.duration_s * (1 + 1e-9)


@pytest.mark.parametrize("name", PAPER)
def test_what_is_fitted_is_said(name):
    assert BASELINES[name].fitted


EVEN = (job("a"), job("b"), job("c", num_params=13e9), job("d", num_params=1.3e9), job("e", num_params=1.3e9))


@pytest.mark.parametrize("seed", range(5))
def test_waiting_costs_more_than_shrinking_and_memory_saves(seed):
    got = {name: work(simulate(BASELINES[name], trace_b(seed), CLUSTER, EVEN)) for name in BASELINES}
    assert got["megatron"] < got["megatron-shrink"]
    assert got["checkpoint-only"] < got["gemini"]
    assert max(got["oobleck"], got["bamboo"], got["varuna"]) < got["megatron"]
    assert got["varuna"] < got["bamboo"] < got["oobleck"]


sizes = st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True)
drawn_jobs = st.lists(
    st.tuples(sizes, st.floats(0.1, 8), st.floats(1e9, 1e11), st.sampled_from([0.0, 0.0, 500.0])), min_size=1, max_size=5
)
kinds = st.sampled_from([ErrorKind.NODE_LOST, ErrorKind.ECC_ERROR, ErrorKind.CUDA_ERROR, ErrorKind.NCCL_TIMEOUT])
strikes = st.lists(
    st.builds(
        Fault,
        at_s=st.floats(0, 5e4),
        kind=kinds,
        node=st.integers(0, 3),
        rank_share=st.floats(0, 0.99),
        repair_s=st.floats(0, 2e4),
    ),
    max_size=12,
)


def drawn(number, sizes, weight, num_params, arrives_s):
    table = {size: 1e14 * size**0.9 for size in sizes}
    work_flop = 3e4 * max(table.values()) if number % 2 else float("inf")
    return SimJob(
        job=f"job-{number}",
        weight=weight,
        throughput_flops=table,
        num_params=num_params,
        arrives_s=arrives_s,
        work_flop=work_flop,
    )


@settings(max_examples=60, deadline=None)
@given(drawn_jobs, strikes, st.sampled_from(sorted(BASELINES)))
def test_no_policy_ever_breaks_an_invariant(some, faults, name):
    jobs = [drawn(number, *figures) for number, figures in enumerate(some)]
    trace = Trace(name="drawn", source="", duration_s=8e4, faults=tuple(sorted(faults, key=lambda one: one.at_s)))
    outcome = simulate(BASELINES[name], trace, SimCluster(num_nodes=4, gpus_per_node=4), jobs)
    assert len(outcome.faults) + outcome.missed == len(faults)


@settings(deadline=None)
@given(drawn_jobs, st.integers(0, 40), st.sampled_from(sorted(RULES)))
def test_rules_share_out_sizes_that_exist_and_fit(some, num_gpus, rule):
    jobs = [drawn(number, *figures) for number, figures in enumerate(some)]
    given = RULES[rule](jobs, num_gpus)
    assert set(given) == {entry.job for entry in jobs}
    assert sum(given.values()) <= num_gpus
    assert all(given[entry.job] in {0, *entry.throughput_flops} for entry in jobs)
    left = num_gpus - sum(given.values())
    if rule != "best":
        larger = [size - given[entry.job] for entry in jobs for size in entry.throughput_flops if size > given[entry.job]]
        assert all(step > left for step in larger)


def worth(jobs, given):
    return sum(entry.weight * entry.flops(given[entry.job]) for entry in jobs)


@settings(deadline=None)
@given(drawn_jobs, st.integers(1, 40))
def test_no_rule_is_better_than_the_best(some, num_gpus):
    jobs = [drawn(number, *figures) for number, figures in enumerate(some)]
    most = worth(jobs, best(jobs, num_gpus))
    assert all(worth(jobs, rule(jobs, num_gpus)) <= most * (1 + 1e-6) for rule in RULES.values())


def test_the_best_of_no_jobs_is_nothing():
    assert best([], 8) == {}


def test_rules_follow_what_they_are_named_after():
    jobs = (job("light"), job("heavy", weight=3.0, num_params=21e9))
    assert RULES["equally"](jobs, 64) == {"light": 32, "heavy": 32}
    assert RULES["weighted"](jobs, 64) == {"light": 16, "heavy": 48}
    assert RULES["sized"](jobs, 64) == {"light": 16, "heavy": 48}


def test_a_rule_moves_every_job_when_a_node_is_lost():
    jobs = (job("a"), job("b"))
    lost = fault(ErrorKind.NODE_LOST, repair_s=7200.0)
    outcome = played(SharedOut(name="equally"), lost, jobs=jobs, cluster=SimCluster(num_nodes=4))
    sizes_of = {name: {segment.gpus for segment in outcome.segments if segment.job == name and segment.flops} for name in "ab"}
    assert sorted(map(sorted, sizes_of.values())) in ([[8, 16], [8, 16]], [[8, 16], [16]])
    stood = {segment.use for segment in outcome.segments if not segment.flops}
    assert Use.OUT_OF_USE in stood


def test_seats_are_never_made_nor_lost():
    seats = Seats.of(SimCluster(num_nodes=3, gpus_per_node=4))
    assert seats.take("a", 6) == 6
    assert seats.take("b", 9) == 6
    assert seats.num_free == 0
    assert seats.sitting(0, 0.99) == "a"
    seats.give("a", 2)
    assert (seats.num_held("a"), seats.num_free) == (4, 2)
    # whole nodes are kept: what a job gives comes from where it has least
    assert sorted(seats.held["a"].values()) == [4]
    lost = seats.lose(next(iter(seats.held["a"])))
    assert lost == {"a": 4}
    seats.back(0)
    assert seats.num_free == 6
    assert seats.take_at("c", 0, 9) == 4
