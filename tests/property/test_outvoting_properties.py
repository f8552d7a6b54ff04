"""Whoever is wrong is named, and nobody else ever is."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.training.outvoting import Outcome, Result, Told, all_agree, judge

TIMES = 4
RIGHT = "right"


@dataclass(frozen=True)
class Case:
    told: list[Told]
    corrupt: set[int]


def rank_that_says(gradients: list[str], states: list[str] | None = None) -> Told:
    pairs = zip(states or ["s"] * TIMES, gradients, strict=True)
    return Told(kind="gpu", results=tuple(Result(state=state, gradient=gradient) for state, gradient in pairs))


GOOD = rank_that_says([RIGHT] * TIMES)
wrong_words = st.sampled_from(["x", "y", "z"])
permanent = wrong_words.map(lambda word: rank_that_says([word] * TIMES))
transient = st.lists(st.one_of(st.just(RIGHT), wrong_words), min_size=TIMES, max_size=TIMES).filter(lambda it: len(set(it)) > 1)
drifted = wrong_words.map(lambda word: rank_that_says([word] * TIMES, [word] * TIMES))


@st.composite
def cases(draw, kinds) -> Case:
    size = draw(st.integers(3, 12))
    corrupt = draw(st.sets(st.integers(0, size - 1), max_size=(size - 1) // 2))
    return Case([draw(kinds) if rank in corrupt else GOOD for rank in range(size)], corrupt)


def assert_exactly_these_are_named(case: Case) -> None:
    finding = judge(case.told)
    assert set(finding.wrong) == case.corrupt
    assert finding.outcome is (Outcome.WRONG if case.corrupt else Outcome.FINE)


@given(cases(st.one_of(permanent, transient.map(rank_that_says))))
def test_fewer_than_half_that_compute_wrongly_are_named_and_nobody_else(case: Case) -> None:
    """Permanently, or now and then, even if all wrong ones say the same."""
    assert_exactly_these_are_named(case)


@given(cases(drifted))
def test_fewer_than_half_that_have_drifted_away_are_named_and_nobody_else(case: Case) -> None:
    assert_exactly_these_are_named(case)


@given(st.integers(2, 12), st.data())
def test_nobody_is_named_where_most_do_not_agree_with_themselves(size: int, data: st.DataObject) -> None:
    unsteady = data.draw(st.sets(st.integers(0, size - 1), min_size=size // 2 + 1))
    others = st.one_of(st.just(GOOD), permanent)
    told = [data.draw(transient.map(rank_that_says) if rank in unsteady else others) for rank in range(size)]
    assert judge(told).outcome is Outcome.NOT_DETERMINISTIC


@given(st.integers(1, 12), st.lists(wrong_words, min_size=TIMES, max_size=TIMES), wrong_words)
def test_ranks_that_say_the_same_are_fine_whatever_it_is(size: int, gradients: list[str], state: str) -> None:
    told = [rank_that_says([gradients[0]] * TIMES, [state] * TIMES)] * size
    assert all_agree(told)
    assert judge(told).outcome is Outcome.FINE


@given(st.lists(st.one_of(st.just(GOOD), permanent, drifted, transient.map(rank_that_says)), min_size=2, max_size=6))
def test_nobody_is_named_who_is_with_a_majority_that_never_wavered(told: list[Told]) -> None:
    finding = judge(told)
    sayings = [one.results for one in told]
    for rank, saying in enumerate(sayings):
        if 2 * sayings.count(saying) > len(told) and len(set(saying)) == 1:
            assert rank not in finding.wrong
