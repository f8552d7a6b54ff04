"""The corpus is whole: every log has a label, every label its logs, and the splits do not repeat each other."""

import re
from collections import Counter
from itertools import combinations

import pytest
from labelled import CORPUS, SPLITS, UNKNOWN, cases

from unicron_lib.domain.failures import ErrorKind

EVERYTHING = cases(*SPLITS)
PAIRS = list(combinations(SPLITS, 2))


def lines_of(path):
    """As an editor counts them: a carriage return begins no new line."""
    return path.read_bytes().decode().split("\n")


def test_every_log_belongs_to_one_case():
    labelled = [path for case in EVERYTHING for path in case.paths]
    assert sorted(labelled) == sorted(CORPUS.rglob("*.log"))


def test_labels_say_what_can_be_answered():
    for case in EVERYTHING:
        assert case.kind in {None, UNKNOWN, *ErrorKind}
        assert case.sources
        assert case.sources <= {"infrastructure", "user", "unknown"}
        assert bool(case.roots) is case.is_fault


def test_root_lines_are_there():
    for case in EVERYTHING:
        texts = {path.name: lines_of(path) for path in case.paths}
        assert all(texts[file][number - 1].strip() for file, number in case.roots)


@pytest.mark.parametrize(
    ("split", "per_kind", "healthy"),
    [("dev", 4, 10), ("held_out", 4, 10), ("reserve", 2, 6), ("learnt", 6, 12), ("unseen", 4, 10)],
)
def test_each_kind_has_its_share(split, per_kind, healthy):
    sizes = Counter(case.group for case in cases(split))
    assert sizes.pop("healthy") >= healthy
    assert sizes.pop(UNKNOWN) >= 2
    assert len(sizes) >= 18
    assert min(sizes.values()) >= per_kind


def test_names_of_files_do_not_give_the_answer_away():
    assert all(re.fullmatch(r"[dhlru]\d{3}(\.[a-z0-9-]+)?\.log", path.name) for path in CORPUS.rglob("*.log"))


@pytest.mark.parametrize("splits", PAIRS)
def test_splits_share_few_lines(splits):
    """Only what every version says in the same words, such as torchrun's summary, may stand in both."""
    first, second = (masked(line for path in paths(split) for line in lines_of(path)) for split in splits)
    assert len(first & second) < 0.1 * len(second)


@pytest.mark.parametrize("splits", PAIRS)
def test_splits_tell_few_causes_in_the_same_line(splits):
    first, second = (masked(roots(split)) for split in splits)
    assert len(first & second) <= 0.05 * len(second)


def paths(split):
    return (path for case in cases(split) for path in case.paths)


def roots(split):
    texts = {path.name: lines_of(path) for path in paths(split)}
    return (texts[file][number - 1] for case in cases(split) for file, number in case.roots)


def masked(lines):
    return {re.sub(r"\d+", "0", line).strip() for line in lines}
