"""Process groups come and go in a process that stays."""

import json

import pytest
from training_jobs import tiny


@pytest.mark.storm
def test_fifty_groups_later_a_process_holds_what_it_held_after_the_first_ones(ranks) -> None:
    """Half of them broke while a rank waited: threads, sockets and files are given back all the same."""
    spec = tiny(job="reformed")
    port = ranks._open_rendezvous(spec, 1)
    for rank in range(2):
        env = ranks._environment(spec, 2, generation=1, rank=rank, port=port, restore_from=None)
        out = ranks.run_dir / f"held-{rank}.json"
        ranks.run(f"reformed-{rank}", "reformation:main", env | {"REFORMATION_OUT": str(out)})
    for rank in range(2):
        # torch asks the DNS for a name at each connection, and some servers let quick askers wait
        ended = ranks._server.await_event("exited", f"{ranks.run_dir}/reformed-{rank}", deadline_s=240.0)
        assert ended["code"] == 0, ranks.logs()
        first, last = json.loads((ranks.run_dir / f"held-{rank}.json").read_text())
        print(first, last)  # noqa: T201
        assert last == first


def test_a_collective_that_never_ends_is_left_behind_by_a_rank_that_is_to_park(ranks) -> None:
    """Nothing breaks the connection here, as if gloo had not noticed: it waits for the end of a send for ever, now and then."""
    spec = tiny(job="behind")
    port = ranks._open_rendezvous(spec, 1)
    for rank in range(2):
        env = ranks._environment(spec, 2, generation=1, rank=rank, port=port, restore_from=None)
        ranks.run(f"behind-{rank}", "left_behind:main", env)
    assert ranks._server.await_event("exited", f"{ranks.run_dir}/behind-0")["code"] == 0, ranks.logs()
