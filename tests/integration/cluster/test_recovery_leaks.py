"""`make storm`: many recoveries in one run, after which agents and ranks hold no more than when each rank had crashed once."""

import logging
import random

import pytest

from unicron_lib.local.census import census

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]
log = logging.getLogger(__name__)
SIZES = {"big": 4, "small": 2}
RECOVERIES = 50
MOST_THREADS = 4
"""An agent's pool gets its last threads when much happens at once; if each recovery left one, that were 44."""
RANKS = [(job, rank) for job, size in SIZES.items() for rank in range(size)]
"""Each crashes once before it is counted: by then every agent has made what it makes once, such as its pool's threads."""


def test_fifty_recoveries_leak_neither_processes_nor_descriptors_nor_threads_nor_shared_memory(pair):
    seed = random.SystemRandom().randrange(10**6)
    log.warning("seed %d", seed)
    chance = random.Random(seed)
    settled = None
    for number in range(1, RECOVERIES + 1):
        known = set(pair.state.incidents)
        job, rank = RANKS[number - 1] if number <= len(RANKS) else chance.choice(RANKS)
        pair.cli("inject", "crash", f"{job}/{rank}")
        pair.until("the failure", lambda _, known=known: pair.new_failures(known))
        pair.calm(SIZES)
        pair.trains_on()
        if number == len(RANKS):
            settled = census(pair.site.cluster_id)
            log.warning("after %d recoveries: %s", number, settled)
    at_the_end = census(pair.site.cluster_id)
    log.warning("after %d recoveries: %s", RECOVERIES, at_the_end)
    grown = at_the_end.grown_since(settled)
    before, after = grown.pop("threads", (0, 0))
    assert grown == {}
    assert after - before <= MOST_THREADS
