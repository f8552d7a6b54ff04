"""Who is wrong, by what all ranks say of the same work."""

import pytest

from unicron_lib.training.outvoting import Outcome, Result, Told, all_agree, judge


def told(gradients: str, *, states: str | None = None, kind: str = "gpu") -> Told:
    """What a rank says: each letter is the digest of a gradient, and of `states` that of the state it read with it."""
    pairs = zip(states or "s" * len(gradients), gradients, strict=True)
    return Told(kind=kind, results=tuple(Result(state=state, gradient=gradient) for state, gradient in pairs))


def wrong(*all_told: Told) -> dict[int, str]:
    finding = judge(all_told)
    assert (finding.outcome is Outcome.WRONG) == bool(finding.wrong)
    return dict(finding.wrong)


def test_all_equal_is_fine() -> None:
    assert all_agree([told("a"), told("a")])
    assert judge([told("aaa")] * 4).outcome is Outcome.FINE


def test_a_permanent_error_is_outvoted() -> None:
    assert wrong(told("aaa"), told("bbb"), told("aaa")) == {1: "each time its gradient is not that of 2 of 3 ranks"}


def test_a_transient_error_gives_itself_away() -> None:
    for one in ("baa", "aba", "abc"):
        assert set(wrong(told("aaa"), told("aaa"), told(one))) == {2}
    assert set(wrong(told("aaa"), told("abc"))) == {1}, "also if there is no majority"


def test_both_at_once() -> None:
    assert set(wrong(told("bbb"), told("aaa"), told("aaa"), told("aba"), told("aaa"))) == {0, 3}


@pytest.mark.parametrize("answers", [("aaa", "bbb"), ("aaa", "bbb", "ccc"), ("aaa", "aaa", "bbb", "bbb")])
def test_without_a_majority_nobody_is_named(answers: tuple[str, ...]) -> None:
    assert judge([told(each) for each in answers]).outcome is Outcome.UNDETERMINED


@pytest.mark.parametrize("answers", [("abc", "def"), ("abc", "cab", "aaa"), ("abb", "bab", "aab", "aaa", "aaa")])
def test_kernels_that_are_not_deterministic_accuse_nobody(answers: tuple[str, ...]) -> None:
    assert judge([told(each) for each in answers]).outcome is Outcome.NOT_DETERMINISTIC


def test_replicas_that_have_drifted_apart_are_told_by_their_states() -> None:
    found = wrong(told("aaa", states="sss"), told("bbb", states="ttt"), told("aaa", states="sss"))
    assert found == {1: "its parameters are not those of 2 of 3 ranks"}
    assert judge([told("aaa", states="sss"), told("bbb", states="ttt")]).outcome is Outcome.UNDETERMINED
    assert set(wrong(told("aab", states="sst"), told("aaa"), told("aaa"))) == {0}, "memory that does not keep what is in it"


def test_states_that_change_everywhere_are_no_matter_of_kernels() -> None:
    assert judge([told("abc", states="abc"), told("def", states="def")]).outcome is Outcome.UNDETERMINED


def test_only_ranks_of_one_kind_are_compared() -> None:
    mixed = [told("aaa", kind="a"), told("bbb", kind="b"), told("aaa", kind="a"), told("bbb", kind="b")]
    assert all_agree(mixed)
    assert judge(mixed).outcome is Outcome.FINE
    assert set(wrong(*mixed, told("aaa", kind="a"), told("ccc", kind="a"))) == {5}
    assert judge([*mixed, told("abc", kind="c")]).outcome is Outcome.FINE, "a single one can be compared with nobody"
