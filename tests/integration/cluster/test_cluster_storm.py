"""`make storm`: many faults in a row, and a part of the control plane killed at a random moment of each recovery."""

import logging
import random

import pytest
from whole_cluster import PARTS

pytestmark = [pytest.mark.storm, pytest.mark.timeout(1800)]
SIZES = {"big": 4, "small": 2}
ROUNDS = 12


def test_a_storm_of_faults_and_kills_always_ends_with_both_jobs_training(pair):
    seed = random.SystemRandom().randrange(10**6)
    logging.getLogger(__name__).warning("seed %d", seed)
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        known = set(pair.state.incidents)
        job = chance.choice(sorted(SIZES))
        fault, target = chance.choice([("crash", f"{job}/{chance.randrange(2)}"), ("node-loss", node_of(pair, job))])
        pair.cli("inject", fault, target)
        pair.until("the failure", lambda _, known=known: pair.new_failures(known))
        steps, part = chance.randrange(6), chance.choice(sorted(PARTS))
        logging.getLogger(__name__).warning("%s %s, %s killed after %d steps", fault, target, part, steps)
        pair.until("the kill's moment", lambda state, steps=steps: at_step(state, steps))
        pair.kill(part)
        pair.until("all healed", lambda state: state.active_plan is None and not state.open_incidents)
        pair.cli("up")
        pair.calm(SIZES)
        pair.trains_on()
        pair.check_journal()


def node_of(cluster, job):
    return cluster.state.jobs[job].assignment.nodes[0]


def at_step(state, steps):
    """The plan under way has done so many steps, or it is over already."""
    plan = state.active_plan
    return len(plan.results) >= steps if plan else not state.open_incidents
