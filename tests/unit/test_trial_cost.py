"""What a trial's figures say, and how they are timed."""

from pathlib import Path

import pytest

from unicron_lib.training import trial_cost
from unicron_lib.training.trial_cost import Cost, timed_alone


@pytest.mark.parametrize(
    ("ratio", "at_most", "ok"), [(0.9, False, True), (0.89, False, False), (0.9, True, True), (0.91, True, False)]
)
def test_a_bar_is_held_from_its_own_side(ratio: float, *, at_most: bool, ok: bool) -> None:
    made = Cost(what="a", value=1.0, unit="s", beside="b", other=1.0, ratio=ratio, bar=0.9, at_most=at_most)
    assert made.ok is ok


def test_what_other_programs_took_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["700 1000000000 3", "900 1250000000 9"])
    monkeypatch.setattr(Path, "read_text", lambda _: next(told))
    monkeypatch.setattr(trial_cost, "timed", lambda act: 2.0 + act())
    assert timed_alone(lambda: 1.0) == pytest.approx(2.75)


def test_where_the_kernel_does_not_tell_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(trial_cost, "timed", lambda _: 2.0)
    assert timed_alone(lambda: None) == 2.0
