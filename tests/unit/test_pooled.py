"""A live cluster of two kinds of instances: recoveries stay within pools, everything else looks at all of them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from scenes import Scene

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.events import NodeJoined, PlanDecided, RebalanceDue
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout, Plan
from unicron_lib.errors import UserError
from unicron_lib.planning.placement import FREELY, Rules
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.pool_rules import ALIKE, PoolPrice, PoolRules, load
from unicron_lib.planning.pooled import is_pooled, tables

SLOW = {2: 1.0e9, 4: 1.9e9}
FAST = {2: 3.0e9, 4: 5.7e9}


class TwoPools(Scene):
    """Two nodes of two GPUs in each of the pools slow and fast."""

    rules: PoolRules = ALIKE
    places: Rules = FREELY

    def open(self) -> "TwoPools":
        for pool in ("slow", "fast"):
            for number in (1, 2):
                self.add(f"{pool}-{number}", pool)
        return self

    def add(self, node: str, pool: str) -> None:
        boot, name = self.new_id("boot"), self.new_id("join")
        self.tell(NodeJoined(id=name, at=self.now, node=node, boot=boot, address="a", num_gpus=2, pool=pool))

    def plan(self, respond: Respond) -> Plan:
        plan = make_plan(
            self.state,
            respond,
            measured={},
            mtbf_gpu_s=6.2e7,
            pool_rules=self.rules,
            rules=self.places,
            timer=time.perf_counter,
        )
        self.tell_plan(plan, respond)
        return plan

    def tell_plan(self, plan: Plan, respond: Respond) -> None:
        self.tell(PlanDecided(id=plan.id, at=self.now, plan=plan, supersedes=respond.supersedes))

    def pools_of(self, job: str) -> set[str]:
        return {self.state.nodes[node].pool for node in self.state.jobs[job].nodes}

    @property
    def newest(self) -> Plan:
        return list(self.state.plans.values())[-1].plan


def submit(scene: TwoPools, job: str, **keys: object) -> None:
    scene.submit(job, **{"throughput_flops": {}, "throughput_by_pool": {"slow": SLOW, "fast": FAST}, **keys})


def test_a_job_gets_all_its_gpus_from_the_pool_where_it_is_fastest() -> None:
    scene = TwoPools().open()
    submit(scene, "a")
    scene.settle()
    assert (scene.pools_of("a"), scene.state.jobs["a"].gpus) == ({"fast"}, 4)


def test_a_recovery_keeps_every_job_in_its_pool_and_a_later_look_at_all_pools_moves_what_pays() -> None:
    scene = TwoPools().open()
    submit(scene, "a", min_gpus=2, weight=2.0)
    submit(scene, "b", min_gpus=2)
    scene.settle()
    assert (scene.pools_of("a"), scene.pools_of("b")) == ({"fast"}, {"slow"})
    scene.lose("fast-1")
    scene.settle()
    assert (scene.pools_of("a"), scene.state.jobs["a"].gpus) == ({"fast"}, 2)
    scene.lose("fast-2")
    scene.settle()
    assert scene.state.jobs["a"].gpus == 0, "a recovery starts it in no other pool"
    due = RebalanceDue(id="rebalance/1", at=scene.now, gain=1.0, reason="a would do better in another pool")
    scene.tell(due)
    scene.settle()
    assert scene.pools_of("a") == {"slow"}
    assert scene.newest.kind == "reallocate"


def test_a_job_that_names_its_pool_stays_there_and_one_of_a_single_pool_comes_back_by_itself() -> None:
    scene = TwoPools().open()
    submit(scene, "a", pool="slow")
    scene.settle()
    assert scene.pools_of("a") == {"slow"}
    scene.lose("slow-1")
    scene.lose("slow-2")
    scene.settle()
    assert scene.state.jobs["a"].gpus == 0
    scene.add("slow-1", "slow")
    scene.settle()
    assert scene.pools_of("a") == {"slow"}


def test_the_budget_holds_and_the_plan_says_what_it_costs() -> None:
    scene = TwoPools()
    scene.rules = PoolRules(
        pools={"fast": PoolPrice(dollars_per_gpu_h=4.0), "slow": PoolPrice(dollars_per_gpu_h=1.0)}, budget_dollars_per_h=9.0
    )
    scene.open()
    submit(scene, "a")
    scene.settle()
    assert (scene.pools_of("a"), scene.state.jobs["a"].gpus) == ({"fast"}, 2)
    assert "8.00 dollars an hour" in scene.newest.reason


def test_a_quota_holds_for_all_jobs_of_a_tenant() -> None:
    scene = TwoPools()
    scene.rules = PoolRules(quotas_gpus={"lab": 4, "nobody": 1})
    scene.open()
    submit(scene, "a", tenant="lab")
    submit(scene, "b", tenant="lab")
    scene.settle()
    assert sum(job.gpus for job in scene.state.jobs.values()) == 4


def test_jobs_that_must_run_and_fit_nowhere_wait_with_a_reason() -> None:
    scene = TwoPools().open()
    submit(scene, "a", min_gpus=4, must_run=True, pool="slow", throughput_by_pool={"slow": {4: 1e9}})
    submit(scene, "b", min_gpus=4, must_run=True, pool="slow", throughput_by_pool={"slow": {4: 1e9}})
    scene.settle()
    assert sorted(job.gpus for job in scene.state.jobs.values()) == [0, 4]
    assert "jobs that must run wait too" in scene.newest.reason


def test_what_has_no_place_waits_and_is_said() -> None:
    scene = TwoPools()
    scene.places = Rules(max_jobs_per_node=1)
    scene.add("slow-1", "slow")
    scene.add("fast-1", "fast")
    for job in ("a", "b"):
        submit(scene, job, pool="slow", min_gpus=1, throughput_by_pool={"slow": {1: 1e9}})
    scene.settle()
    assert sorted(job.gpus for job in scene.state.jobs.values()) == [0, 1]


def test_tables_hold_where_they_were_given_or_measured() -> None:
    spec = JobSpec(job="a", throughput_flops=SLOW)
    pools = ("fast", "slow")
    assert tables(spec, SLOW, pools=pools, home="slow") == {"fast": SLOW, "slow": SLOW}
    measured = replace(spec, throughput_flops={})
    assert tables(measured, SLOW, pools=pools, home="slow") == {"slow": SLOW}
    assert tables(measured, SLOW, pools=pools, home=None) == {"fast": SLOW, "slow": SLOW}
    assert tables(replace(measured, pool="fast"), SLOW, pools=pools, home=None) == {"fast": SLOW}
    given = replace(measured, throughput_by_pool={"fast": {2: 1.0, 16: 2.0}, "gone": SLOW})
    assert tables(given, {}, pools=pools, home="slow") == {"fast": {2: 1.0}}, "16 ranks have no work: 8 micro-batches"


def test_one_pool_is_no_pool() -> None:
    scene = TwoPools()
    scene.add("slow-1", "slow")
    assert not is_pooled([JobSpec(job="a")], scene.state.nodes.values())
    assert is_pooled([JobSpec(job="a", pool="slow")], scene.state.nodes.values())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pools: {a100: {dollars_per_gpu_h: -1}}", "dollars_per_gpu_h"),
        ("pool: {}", "pool"),
        ("[", "is not YAML"),
        ("quotas_gpus: {lab: many}", "quotas_gpus.lab"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(
        "pools: {spot: {dollars_per_gpu_h: 1.3, mtbf_gpu_s: 1.5e+6}}\nbudget_dollars_per_h: 100\nquotas_gpus: {lab: 8}\n"
    )
    found = load(path)
    assert (found.pools["spot"].mtbf_gpu_s, found.budget, found.quotas_gpus) == (1.5e6, 100.0, {"lab": 8})
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "nowhere.yaml")


def test_a_job_chooses_its_layout_in_a_pool_and_groups_of_tensor_parallelism_stay_on_a_node() -> None:
    scene = TwoPools().open()
    ways = (
        ParallelLayout(tensor_model_parallel_size=2, throughput_flops={2: 3.0e9}),
        ParallelLayout(throughput_flops={1: 1.0e9, 2: 2.0e9}),
    )
    scene.submit("narrow", min_gpus=1, max_gpus=1, pool="slow", throughput_flops={1: 9.0e9})
    scene.submit("wide", min_gpus=1, max_gpus=2, pool="slow", throughput_flops={}, parallel_layouts=ways)
    scene.settle()
    wide = scene.state.jobs["wide"].assignment
    assert wide.layout == Layout(tp=2)
    assert len({slot.node for slot in wide.slots}) == 1
    assert tables(scene.state.jobs["wide"].spec, {2: 3.0e9}, pools=("slow", "fast"), home="fast") == {"slow": {2: 3.0e9}}
