"""How often the diagnosis is right about logs that its rules were not written from, and what it must never get wrong."""

import pytest
from labelled import SPLITS, cases
from score import answers, report, share


@pytest.fixture(scope="module", params=SPLITS)
def answered(request):
    found = answers(cases(request.param))
    print(f"\n{request.param}\n{report(found)}")  # noqa: T201  pytest -s shows it, and every failure
    return found


def test_root_causes_are_right(answered):
    assert share([answer for answer in answered if answer.case.is_fault], "is_right") >= 0.95


def test_no_healthy_run_is_called_faulty(answered):
    assert not [answer.case.name for answer in answered if answer.case.kind is None and answer.diagnosis.kind is not None]


def test_hardware_is_not_blamed_for_what_users_did(answered):
    assert not [answer.case.name for answer in answered if answer.blames_hardware_wrongly]


def test_what_a_log_does_not_tell_is_not_made_up(answered):
    assert not [answer.case.name for answer in answered if answer.case.kind == "unknown" and not answer.is_right]
