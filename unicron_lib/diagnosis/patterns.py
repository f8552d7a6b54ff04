"""What can be told of a regular expression from its parse tree: the plain text that it needs, whether it can blow up."""

import math
import re
from collections.abc import Iterable
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MIN_NEEDLE = 3
"""Shorter plain texts are in most lines anyway."""
_REPEATS = frozenset({code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT})
LONGEST = 2000
"""Characters of a line that are looked at, so no repetition is longer."""
MAX_WAYS = 300_000
"""A pattern with more ways to match takes noticeable time on the worst line."""


def needles(pattern: str) -> frozenset[str]:
    """Plain texts of which every line that the pattern is found in contains at least one; empty if there are none such."""
    return _needles(parser.parse(pattern)) or frozenset()


def _needles(tree: Iterable[Any]) -> frozenset[str] | None:
    """The best alternatives of a sequence: any part of it that must be there will do, the longest is rarest."""
    found: list[frozenset[str]] = []
    run = ""
    for op, value in tree:
        if op is code.LITERAL:
            run += chr(value)
            continue
        found, run = [*found, *_of_run(run)], ""
        inner = _of_part(op, value)
        found += [inner] if inner else []
    found += _of_run(run)
    return max(found, key=lambda texts: min(map(len, texts)), default=None)


def _of_run(run: str) -> list[frozenset[str]]:
    return [frozenset({run})] if len(run) >= MIN_NEEDLE else []


def _of_part(op: Any, value: Any) -> frozenset[str] | None:
    if op is code.SUBPATTERN:
        _, added, _, inner = value
        return None if added & re.IGNORECASE else _needles(inner)
    if op is code.BRANCH:
        branches = [_needles(branch) for branch in value[1]]
        return frozenset().union(*(it for it in branches if it)) if all(branches) else None
    if op in _REPEATS and value[0] > 0:
        return _needles(value[2])
    return None


def is_bomb(pattern: str, most_ways: int = MAX_WAYS) -> bool:
    """Whether matching may take forever, as far as its shape tells: too many ways to share a line among repetitions.

    Such as `(a+)+`, `(a|aa)+` or `.*.*x`; a pattern that looks back at what it matched counts too. Raises re.error for no
    pattern at all.
    """
    tree = parser.parse(pattern)
    return any(op in {code.GROUPREF, code.GROUPREF_EXISTS} for op, _ in _walk(tree)) or _ways(tree) > most_ways


def _ways(tree: Iterable[Any]) -> float:
    """In how many ways the pattern may match at one place of a line, at most."""
    total = 1.0
    for op, value in tree:
        if op in _REPEATS:
            total *= _ways_to_repeat(value[0], min(value[1], LONGEST), _ways(value[2]))
        elif op is code.BRANCH:
            total *= sum(map(_ways, value[1]))
        else:
            total *= max(map(_ways, _children(op, value)), default=1.0)
    return total


def _ways_to_repeat(least: int, most: int, each: float) -> float:
    if each == 1:
        return most - least + 1
    return each**most + (least == 0) if most * math.log(each) < math.log(MAX_WAYS) else math.inf


def _children(op: Any, value: Any) -> list[Any]:
    if op is code.SUBPATTERN:
        return [value[3]]
    if op is code.BRANCH:
        return list(value[1])
    if op in _REPEATS:
        return [value[2]]
    if op in {code.ASSERT, code.ASSERT_NOT}:
        return [value[1]]
    return [value] if op is code.ATOMIC_GROUP else []


def _walk(tree: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    for op, value in tree:
        yield op, value
        for child in _children(op, value):
            yield from _walk(child)
