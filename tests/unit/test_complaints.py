"""Which complaint of a rank may be about the ranks of which node."""

import pytest

from unicron_lib.agent.messages import Observation, RankExited, RankInfo
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.controller.complaints import Complaints

RANKS = (RankInfo(job="gpt-a", generation=4, rank=2, gpu=0, pid=1),)


def told(node: str, error: str, *, job: str = "gpt-a", generation: int = 4) -> Observation:
    body = RankFailed(
        job=job,
        generation=generation,
        rank=0,
        iteration=7,
        error_type="RuntimeError",
        message=error,
        traceback="",
        parked=True,
    )
    return Observation(node=node, boot="b", seq=1, at=1.0, body=body)


LOST_ONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:17328."


@pytest.mark.parametrize(
    ("observations", "at"),
    [
        ([told("n1", LOST_ONE)], 0),
        ([told("n1", LOST_ONE), told("n3", LOST_ONE)], 1),
        ([told("n1", LOST_ONE), told("n2", LOST_ONE)], 0),
        ([told("n2", LOST_ONE)], None),
        ([told("n1", "CUDA error: an illegal memory access was encountered")], None),
        ([told("n1", LOST_ONE, job="gpt-b")], None),
        ([told("n1", LOST_ONE, generation=3)], None),
        ([told("n1", LOST_ONE), told("n1", LOST_ONE, generation=3)], 0),
        ([told("n1", LOST_ONE), told("n1", LOST_ONE, generation=5)], None),
    ],
)
def test_only_what_others_of_the_same_generation_have_lost_counts(observations, at):
    complaints = Complaints()
    for now, observation in enumerate(observations):
        complaints.hear(observation, now=now)
    found = complaints.about("n2", RANKS)
    assert (found.at if found else None) == at


def test_an_exit_is_no_complaint():
    complaints = Complaints()
    body = RankExited(job="gpt-a", generation=4, rank=0, pid=1, exit_code=-9, iteration=7)
    complaints.hear(Observation(node="n1", boot="b", seq=1, at=1.0, body=body), now=0.0)
    assert complaints.about("n2", RANKS) is None
