"""When a node is judged, with explicit times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.controller.liveness import Complaint, Contact, Patience, Stepping, Verdict, judge

ENDED = "its connection was reset"


def stepping(at: float) -> Stepping:
    return Stepping(job="a", iteration=7, reporter="n1", at=at)


def ended(at: float, heard_at: float = 100.0) -> Contact:
    return Contact(heard_at=heard_at, ended_at=at, ending=ENDED)


@pytest.mark.parametrize(
    ("now", "contact", "sign", "verdict"),
    [
        (102.9, Contact(heard_at=100), None, Verdict.ALIVE),
        (103.0, Contact(heard_at=100), None, Verdict.SUSPECT),
        (104.9, Contact(heard_at=100), None, Verdict.SUSPECT),
        (105.0, Contact(heard_at=100), None, Verdict.LOST),
        (100.0, ended(100.0), None, Verdict.SUSPECT),
        (102.9, ended(100.0), None, Verdict.SUSPECT),
        (103.0, ended(100.0), None, Verdict.LOST),
        (103.5, ended(101.0), None, Verdict.SUSPECT),
        (105.0, ended(104.9), None, Verdict.LOST),
        (105.0, Contact(heard_at=100), stepping(99.0), Verdict.LOST),
        (105.0, Contact(heard_at=100), stepping(100.5), Verdict.SUSPECT),
        (3600.0, ended(100.0), stepping(3599.0), Verdict.SUSPECT),
        (3602.0, ended(100.0), stepping(3599.0), Verdict.LOST),
    ],
)
def test_liveness(now: float, contact: Contact, sign: Stepping | None, verdict: Verdict) -> None:
    found, reason = judge(now, contact, sign)
    assert found is verdict
    assert reason


@pytest.mark.parametrize(
    ("now", "contact", "missed_at", "sign", "verdict"),
    [
        (101.4, ended(100.0), 100.1, None, Verdict.SUSPECT),
        (101.5, ended(100.0), 100.1, None, Verdict.LOST),
        (101.5, ended(100.0, heard_at=100.0), 99.0, None, Verdict.LOST),
        (101.5, ended(100.0, heard_at=100.0), 98.9, None, Verdict.SUSPECT),
        (104.9, Contact(heard_at=100), 100.1, None, Verdict.SUSPECT),
        (102.0, ended(100.0), 100.1, stepping(100.6), Verdict.SUSPECT),
        (102.1, ended(100.0), 100.1, stepping(100.6), Verdict.LOST),
    ],
)
def test_a_node_whose_ranks_are_missed_too_is_lost_sooner(now, contact, missed_at, sign, verdict) -> None:
    complaint = Complaint(job="a", generation=3, rank=2, reporter="n1", at=missed_at)
    found, reason = judge(now, contact, sign, complaint=complaint)
    assert found is verdict
    if verdict is Verdict.LOST:
        assert reason.endswith("and a rank 2 at n1 has lost others, too")


@pytest.mark.parametrize(
    ("contact", "words"),
    [
        (ended(104.0), "its connection was reset, and it has not dialled again for 4.0 s"),
        (Contact(heard_at=100), "its connection is open, but it has been silent for 8.0 s"),
        (Contact(heard_at=100, dialled=False), "it has not dialled in within 8.0 s of the controller's start"),
    ],
)
def test_the_reason_tells_the_ways_to_be_gone_apart(contact: Contact, words: str) -> None:
    assert judge(108.0, contact) == (Verdict.LOST, words)


@given(
    heard=st.floats(0, 100),
    open_s=st.floats(0, 10),
    closed_s=st.none() | st.floats(0, 10),
    stepped_s=st.none() | st.floats(0, 20),
)
def test_the_grace_counts_from_the_last_sign_of_life(
    heard: float, open_s: float, closed_s: float | None, stepped_s: float | None
) -> None:
    """Never lost before the shorter grace, always after the longer one, and no evidence makes it worse."""
    patience = Patience()
    contact = Contact(heard_at=heard, ended_at=None if closed_s is None else heard + open_s, ending=ENDED)
    now = heard + open_s + (closed_s or 0.0)
    sign = None if stepped_s is None else stepping(now - stepped_s)
    verdict, _ = judge(now, contact, sign, patience)
    quiet_s = now - max(heard, sign.at if sign else heard)
    if quiet_s < patience.lost_closed_s:
        assert verdict is not Verdict.LOST
    if quiet_s >= patience.lost_silent_s:
        assert verdict is Verdict.LOST
    if verdict is Verdict.LOST:
        assert judge(now, contact, None, patience)[0] is Verdict.LOST


def test_outages_of_a_node_that_steps_never_add_up() -> None:
    """PB56: five outages of 40 s, while the job steps each second, are no failure."""
    for outage in range(5):
        start = outage * 600.0
        verdicts = {judge(start + t, Contact(heard_at=start), stepping(start + t - t % 1))[0] for t in range(1, 41)}
        assert verdicts == {Verdict.ALIVE, Verdict.SUSPECT}
    _, reason = judge(40.0, Contact(heard_at=0.0), stepping(39.5))
    assert "job a" in reason
    assert "iteration 7" in reason
    assert "n1" in reason
