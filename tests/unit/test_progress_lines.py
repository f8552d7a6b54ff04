"""A rank's progress as a line: what the agent reads is what was meant, whatever the values are."""

from math import inf, isnan, nan
from pathlib import Path

import pytest

from unicron_lib.agent.rank_messages import Progress, from_rank
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.progress_lines import ProgressLines

ENV = RankEnvironment(
    spec=JobSpec(job="llama-7b"),
    generation=4,
    rank=3,
    world_size=8,
    local_rank=1,
    master_addr="",
    master_port=0,
    node="node-1",
    run_dir=Path("/nowhere"),
    agent_socket="",
    store_url="",
)
ORIGIN = {
    "source": '100%d "größe"',
    "copied_bytes": 7,
    "copy_s": 0.5,
    "kept_micro_batches": 3,
    "recomputed_micro_batches": 2,
    "discarded_micro_batches": 4,
}
MEASURED = {"iteration_s": 0.1 + 0.2, "flops": 1.5e16, "compute_s": 1e-7}


def told(iteration, origin, **measured):
    sent = []
    ProgressLines(ENV, sent.append, **origin).tell(iteration, **MEASURED, **measured)
    return sent


@pytest.mark.parametrize("origin", [{}, ORIGIN])
@pytest.mark.parametrize(("loss", "grad_norm"), [(2.5, 1.0), (-0.0, 1e-300), (inf, 1.0), (2.5, -inf)])
def test_the_agent_reads_what_was_told(origin, loss, grad_norm):
    (line,) = told(12, origin, loss=loss, grad_norm=grad_norm)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read = from_rank.validate_json(line)
    fixed = {"job": "llama-7b", "generation": 4, "rank": 3, "world_size": 8}
    assert read == Progress(**fixed, **origin, iteration=12, loss=loss, grad_norm=grad_norm, at=read.at, **MEASURED)


def test_a_line_of_a_rank_that_tells_nothing_of_lost_work_is_read():
    (line,) = told(12, {"kept_micro_batches": 3}, loss=2.5)
    assert b"discarded" not in line
    assert from_rank.validate_json(line).discarded_micro_batches == 0


def test_a_loss_that_is_no_number_stays_none():
    read = from_rank.validate_json(*told(12, {}, loss=nan, grad_norm=nan))
    assert isinstance(read, Progress)
    assert isnan(read.loss)
    assert isnan(read.grad_norm)
