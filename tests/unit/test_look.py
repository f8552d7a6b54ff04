"""What `unicron status`, `jobs` and `nodes` show of a state, and how the breaker is reset."""

from dataclasses import dataclass

import pytest
from scenes import running_pair

from unicron_lib.adapters.files import FileStore
from unicron_lib.cli import look
from unicron_lib.cli.nodes import _quarantine, _reset_breaker
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import BreakerTripped, FailureDetected, IncidentDismissed, NodeNoted, StragglerDetected
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.errors import UserError
from unicron_lib.journal import Journal


@dataclass
class FakeTarget:
    """A target of which only the journal is asked."""

    store: FileStore
    ui_url: str = ""

    def journal(self):
        return Journal(self.store)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A journal of two running jobs."""
    found = FakeTarget(FileStore(tmp_path))
    journal = found.journal()
    for event in running_pair().events:
        journal.append(event)
    monkeypatch.setattr(look, "_live", lambda _: {})
    return found


def test_notes_and_slow_ranks_are_shown_with_what_they_are_about(target):
    journal = target.journal()
    boot, generation = journal.refresh().nodes["node-1"].boot, journal.state.jobs["gpt-a"].generation
    journal.append(NodeNoted(id="n", at=1.0, node="node-1", boot=boot, code="gpu_hot", text="GPU 1 at 95 C", active=True))
    journal.append(
        StragglerDetected(id="s", at=1.0, job="gpt-a", generation=generation, ratio=1.4, reason="slow", rank=3, node="node-2")
    )
    state = look.read_state(target)
    assert {row["node"]: row["notes"] for row in look.node_rows(state)}["node-1"] == "gpu_hot: GPU 1 at 95 C"
    assert {row["job"]: row["slow"] for row in look.job_rows(state, {})}["gpt-a"] == "rank 3 1.40x at node-2: slow"


def test_the_breaker_is_a_banner_until_a_person_resets_it(target):
    assert not [part for part in look._screen(target) if isinstance(part, str)]
    target.journal().append(BreakerTripped(id="t", at=1.0, reason="too many"))
    (banner,) = (part for part in look._screen(target) if isinstance(part, str))
    assert "unicron nodes --reset-breaker" in banner
    assert "too many" in banner
    _reset_breaker(target)
    assert not [part for part in look._screen(target) if isinstance(part, str)]
    with pytest.raises(UserError, match="has not tripped"):
        _reset_breaker(target)


def test_a_false_alarm_of_the_breaker_is_journalled_as_one(target):
    journal = target.journal()
    boot = journal.refresh().nodes["node-1"].boot
    journal.append(BreakerTripped(id="t", at=1.0, reason="too many"))
    found = {"kind": ErrorKind.ECC_ERROR, "method": DetectionMethod.NODE_HEALTH, "node": "node-1", "boot": boot}
    failure = Failure(id="ecc", seen_at=2.0, **found)
    journal.append(FailureDetected(id="ecc", at=2.0, failure=failure))
    name = journal.state.open_incidents[0].id
    journal.append(IncidentDismissed(id="d", at=3.0, incident=name, reason="the breaker"))
    assert journal.state.incidents[name].held
    _reset_breaker(target, false_alarm=True)
    assert not journal.refresh().open_incidents


def test_a_person_isolates_a_node_with_a_reason(target):
    with pytest.raises(UserError, match="no node 'node-9'"):
        _quarantine(target, "node-9", "noisy")
    with pytest.raises(UserError, match="--reason"):
        _quarantine(target, "node-1", "")
    _quarantine(target, "node-1", "its fan is noisy")
    state = look.read_state(target)
    assert state.nodes["node-1"].status is NodeStatus.QUARANTINED
    assert {row["node"]: row["reason"] for row in look.node_rows(state)}["node-1"] == "isolated by a person: its fan is noisy"
    with pytest.raises(UserError, match="quarantined already: isolated by a person: its fan"):
        _quarantine(target, "node-1", "again")
