"""Every event of the journal is told under a dotted name of ours, or only by its incident."""

from typing import get_args

import pytest

from tasks.events import NAMES, name_of
from unicron_lib.domain import events as e
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure


@pytest.mark.parametrize(
    ("kind", "job", "symptom", "name"),
    [
        (ErrorKind.NODE_LOST, None, False, "unicron.node.unhealthy"),
        (ErrorKind.GPU_LOST, None, False, "unicron.node.unhealthy"),
        (ErrorKind.OTHER, None, True, None),
        (ErrorKind.PROCESS_EXIT, "a", False, "unicron.job.process_exited"),
        (ErrorKind.TASK_HANG, "a", False, "unicron.job.step_stalled"),
        (ErrorKind.NCCL_TIMEOUT, "a", False, "unicron.job.step_stalled"),
        (ErrorKind.USER_ERROR, "a", False, None),
    ],
)
def test_failures(kind, job, symptom, name):
    failure = Failure(id="f", kind=kind, method=DetectionMethod.PROCESS, seen_at=1.0, job=job, symptom=symptom)
    assert name_of(e.FailureDetected(id="f", at=1.0, failure=failure)) == name


def test_names_are_of_events_that_exist():
    assert set(NAMES) <= set(get_args(e.Event))
    assert all(name.startswith("unicron.") and name == name.lower() and name.count(".") == 2 for name in NAMES.values())
    assert len(set(NAMES.values())) == len(NAMES)


@pytest.mark.parametrize(("over", "name"), [(False, "unicron.job.loss_spiked"), (True, "unicron.job.loss_settled")])
def test_a_spike_of_the_loss_and_its_end(over, name):
    event = e.LossSpiked(id="s", at=1.0, job="a", generation=1, iteration=3, reason="2.2 to 5.1", over=over)
    assert name_of(event) == name
