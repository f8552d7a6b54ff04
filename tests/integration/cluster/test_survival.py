"""Parts of the control plane are killed while a recovery runs, and started again by the supervisor: always the same end."""

import logging
import os
import random
import signal

import psutil
import pytest

from unicron_lib.domain.events import StepCompleted
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import StepKind

SIZES = {"big": 4, "small": 2}
log = logging.getLogger(__name__)


def pid_of_rank(cluster, job, rank):
    """By the controller's word."""
    found = (it for node in cluster.ask(lambda client: client.nodes()) for it in node.ranks)
    return next(it.pid for it in found if (it.job, it.rank) == (job, rank))


@pytest.mark.parametrize("part", ["recovery", "controller", "prefect-server"])
def test_a_control_process_dies_at_a_random_moment_of_a_recovery(pair, part):
    known, pid = set(pair.state.incidents), pair.pid(part)
    steps = random.SystemRandom().randrange(len(StepKind))
    log.warning("%s is killed after %d steps", part, steps)
    with pair.beside("inject", "crash", "big/1"):
        wait_at_once(pair, f"{steps} steps", lambda state: any(len(it.results) >= steps for it in new_plans(state, known)))
        pair.kill(part, pid=pid)
    pair.calm(SIZES)
    pair.trains_on()
    (incident,) = pair.new_failures(known)
    assert (incident.kind, incident.jobs) == (ErrorKind.PROCESS_EXIT, ("big",))
    pair.check_journal()


@pytest.mark.storm
@pytest.mark.parametrize("after", StepKind)
def test_a_recovery_killed_between_two_steps_goes_on_without_doing_one_twice(pair, after):
    known, seq, pid = set(pair.state.incidents), pair.state.seq, pair.pid("recovery")
    generation = pair.state.jobs["big"].generation

    def step_done(state):
        return any(step.kind is after and step.id in it.results for it in new_plans(state, known) for step in it.plan.steps)

    with pair.beside("inject", "crash", "big/0"):
        wait_at_once(pair, f"{after} done", step_done)
        pair.kill("recovery", pid=pid)
    pair.calm(SIZES)
    pair.trains_on()
    state = pair.state
    assert state.jobs["big"].generation == generation + 1, "killed and restarted, it was still one plan"
    steps = [e.event.id for e in pair.journal.entries() if e.seq > seq and isinstance(e.event, StepCompleted)]
    assert sorted(steps) == sorted(set(steps))
    for log_file in (pair.site.run_dir / "logs" / "big").glob(f"g{generation + 1}-r[0-9].log"):
        assert log_file.read_text().count("goes on after iteration") == 1, f"{log_file}: a rank was launched twice"
    pair.check_journal()


def new_plans(state, known):
    """Those that answer incidents which are not known yet; the newest may be over already."""
    return [it for it in state.plans.values() if not set(it.plan.incidents) <= known]


def wait_at_once(cluster, what, holds):
    """Between two steps are milliseconds."""
    cluster.wait(what, lambda: holds(cluster.state), pause_s=0.005)
    log.warning("%s; the plan is %s", what, "under way" if cluster.journal.state.active_plan else "over")


def test_a_lost_node_is_planned_around_and_taken_back(pair):
    node = pair.state.jobs["big"].assignment.nodes[0]
    known = set(pair.state.incidents)
    pair.cli("inject", "node-loss", node)
    pair.calm({"big": 2, "small": 2} if len(pair.state.nodes) == 2 else {"big": 4})
    pair.trains_on()
    (incident,) = [it for it in pair.new_failures(known) if it.status == "closed"]
    assert (incident.kind, incident.node) == (ErrorKind.NODE_LOST, node)
    pair.cli("up")
    pair.calm(SIZES)
    pair.check_journal()


def test_with_the_train_flow_dead_failures_are_still_handled(pair):
    pair.until("both jobs have a train run, and no other run is left", lambda _: len(train_runs(pair)) == 2)
    dead = train_runs(pair)
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    known = set(pair.state.incidents)
    pair.cli("inject", "crash", "small/0")
    pair.until("the failure", lambda _: pair.new_failures(known))
    pair.calm(SIZES)
    pair.trains_on()
    pair.check_journal()
    pair.until("new train runs", lambda _: len(set(train_runs(pair)) - set(dead)) == 2)


def train_runs(cluster):
    """Process ids of runs that a worker started: the train runs, and for moments those of the automation."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("UNICRON_CLUSTER_ID") == cluster.site.cluster_id
            if ours and any("prefect.engine" in part for part in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_hung_rank_is_noticed_and_replaced(pair):
    known = set(pair.state.incidents)
    pair.cli("inject", "hang", "small/1")
    pair.until("the hang", lambda _: pair.new_failures(known))
    pair.calm(SIZES)
    pair.trains_on()
    assert {it.kind for it in pair.new_failures(known)} <= {ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT}
    pair.check_journal()


def test_a_store_that_is_away_stops_no_training_and_loses_nothing(pair):
    """The directory of the store goes away, as a mount does, a rank dies meanwhile, and the directory comes back."""
    known = set(pair.state.incidents)
    store = pair.site.path / "store"
    before = pair.iterations()
    away = store.rename(store.with_name("store-away"))
    try:
        os.kill(pid_of_rank(pair, "big", 1), signal.SIGKILL)
        pair.wait("the other job to train on", lambda: live(pair)["small"] > before["small"] + 5)
        assert not store.exists(), "nobody may begin an empty journal in its place"
    finally:
        away.rename(store)
    pair.until("the failure", lambda _: pair.new_failures(known))
    pair.calm(SIZES)
    pair.trains_on()
    assert [it.kind for it in pair.new_failures(known)] == [ErrorKind.PROCESS_EXIT]
    pair.check_journal()


def live(cluster):
    """Newest iteration of each job, by the controller's word."""
    return {it.job: it.iteration for it in cluster.ask(lambda client: client.progress())}


@pytest.mark.storm
def test_with_the_recovery_service_frozen_the_automation_heals(pair):
    """The safety net: Prefect's proactive automation starts `recover` under the worker."""
    known = set(pair.state.incidents)
    frozen = pair.pid("recovery")
    os.kill(frozen, signal.SIGSTOP)
    try:
        pair.cli("inject", "crash", "big/1")
        pair.until("the failure", lambda _: pair.new_failures(known))
        pair.calm(SIZES)
        pair.trains_on()
    finally:
        os.kill(frozen, signal.SIGCONT)
    pair.calm(SIZES)
    pair.check_journal()
