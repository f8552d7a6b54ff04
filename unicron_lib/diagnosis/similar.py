"""Past incidents that read like this one: TF-IDF over hashed words and pairs of words. No network, nothing learnt before."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unicron_lib.domain.failures import ErrorKind

BUCKETS = 1 << 20
MAX_CHARS = 16 << 10
"""Characters of a text that are compared."""
LIKE_AT_LEAST = 0.3
"""A likeness below says nothing: words of any two logs have that much in common."""

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)*")
_WORD = re.compile(r"[A-Za-z_#]{2,64}")

Vector = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An incident that is over: what it was, what was seen of it."""

    id: str
    kind: ErrorKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """A past incident, and how much alike it is: 1 for the same words, 0 for none in common."""

    past: Past
    share: float


def nearest(text: str, past: Sequence[Past], limit: int = 3) -> tuple[Likeness, ...]:
    """The past incidents most like `text`, best first, those with nothing to say left out."""
    counts = [_terms(it.text) for it in past]
    rarity = _rarity(counts)
    mine = _vector(_terms(text), rarity)
    found = (Likeness(past=it, share=_cosine(mine, _vector(count, rarity))) for it, count in zip(past, counts, strict=True))
    alike = (it for it in found if it.share >= LIKE_AT_LEAST)
    return tuple(sorted(alike, key=lambda it: (-it.share, it.past.id))[:limit])


def _terms(text: str) -> Counter[int]:
    """Counts of words and pairs of words, numbers all the same: an incident is not its ranks and addresses."""
    words = [word.lower() for word in _WORD.findall(_NUMBER.sub("#", text[:MAX_CHARS]))]
    pairs = (f"{one} {two}" for one, two in pairwise(words))
    return Counter(zlib.crc32(term.encode()) % BUCKETS for term in (*words, *pairs))


def _rarity(counts: Sequence[Counter[int]]) -> Vector:
    spread = Counter(term for count in counts for term in count)
    return {term: math.log((1 + len(counts)) / (1 + num)) + 1 for term, num in spread.items()}


def _vector(count: Counter[int], rarity: Vector) -> Vector:
    unseen = max(rarity.values(), default=1.0)
    return {term: (1 + math.log(num)) * rarity.get(term, unseen) for term, num in count.items()}


def _cosine(one: Vector, two: Vector) -> float:
    both = sum(value * two[term] for term, value in one.items() if term in two)
    size = math.sqrt(_square(one.values()) * _square(two.values()))
    return both / size if size else 0.0


def _square(values: Iterable[float]) -> float:
    return sum(value * value for value in values)
