"""One log, sifted: all its lines are counted by kind, and those that may tell why a job failed come out, in order.

Speed comes from looking at lines in thousands: a block of them without its digits and blanks is cut into keys, and only a
key that was not seen before is looked at in Python. What comes out of the lines with one key:

- of noise, nothing; of iterations, the first few after anything else that came out, and the last before the next;
- the first 100, and then each in which a number of up to three digits is new: codes, ranks and statuses are such;
- of the others, the last before whatever comes out next: what a log says at last is never lost.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.noise import BINARY, is_binary, is_telling, noise_of
from unicron_lib.diagnosis.reading import CONTROLS, Block, clean
from unicron_lib.diagnosis.templates import Kind, Kinds
from unicron_lib.diagnosis.times import rank_of_file, rank_of_line, time_of
from unicron_lib.diagnosis.wording import is_progress

FIRST_KEPT = 100
"""Lines with one key that come out whatever their numbers."""
PROGRESS_KEPT = 4
"""Iterations that come out in a row: enough to tell that a job goes on."""
MAX_PENDING = 16
MAX_KEYS, MAX_KEY_BYTES = 20_000, 8 << 20
MAX_KEPT = 2000
_LOOKED_AT = 2000
_LOOK_BACK = 40
"""Lines before one without a time among which its time is looked for."""

_IRRELEVANT = bytes(sorted({*b"0123456789 \t", *CONTROLS}))
_HEX = re.compile(rb"0x[0-9a-fA-F]+")
_NAN_COUNT = re.compile(rb"nan iterations: +[1-9]")
_NAN_COUNT_OF = re.compile(_NAN_COUNT.pattern.decode())
"""The one number in an iteration's line that tells of a failure: in that line only, not in all that are like it."""
_BINARY_KEY = b"0"
"""Lines without anything to read have it: no other key has digits. No two such lines are alike, and to look at each is slow."""
_NUMBERS_ONLY = bytes(byte if byte in b"0123456789.:-" else ord(" ") for byte in range(256))


@dataclass(slots=True)
class Known:
    """What lines with one key are."""

    kind: Kind
    telling: bool
    progress: bool


class Keys:
    """What is known of lines with the same key, for all logs of a job together.

    A line for which `is_wanted` is true is no noise, nor is one that differs from it by no more than numbers and blanks.
    """

    def __init__(self, kinds: Kinds, is_wanted: Callable[[str], bool]) -> None:
        self.kinds = kinds
        self._is_wanted = is_wanted
        self._keys: dict[bytes, Known] = {}
        self._num_bytes = 0

    def new_among(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that are not known; what is known is forgotten when it is too much."""
        if len(self._keys) > MAX_KEYS or self._num_bytes > MAX_KEY_BYTES:
            self._keys, self._num_bytes = {}, 0
        return [key for key in keys if key not in self._keys]

    def learn(self, key: bytes, line: bytes) -> Kind:
        """Find out what lines with this key are, from one of them."""
        self._num_bytes += len(key)
        if key == _BINARY_KEY:
            kind = self.kinds.of("", noise=BINARY, telling=False)
            self._keys[key] = Known(kind, telling=False, progress=False)
            return kind
        text, squeezed = clean(line), key[:_LOOKED_AT].decode(errors="replace").lower()
        wanted = self._is_wanted(_NAN_COUNT_OF.sub("", text))
        telling = wanted or is_telling(squeezed)
        noise = None if wanted else noise_of(text, squeezed, telling=telling)
        kind = self.kinds.of(text, noise=noise, telling=telling)
        self._keys[key] = Known(kind, telling=telling, progress=noise is not None and is_progress(text))
        return kind

    def __getitem__(self, key: bytes) -> Known:
        return self._keys[key]


class Sifter:
    """Sifts one log. `reference`, epoch seconds, is what times without a year are near to."""

    def __init__(self, file: str, keys: Keys, reference: float) -> None:
        self._file, self._keys, self._reference = file, keys, reference
        self._rank = rank_of_file(file)
        self._kept: dict[int, int] = {}
        self._codes: dict[int, set[bytes]] = {}
        self._pending: dict[int, Line | int] = {}
        self._progress_owed, self._num_progress = PROGRESS_KEPT, 0
        self._lines: list[bytes] = []
        self._numbers: Sequence[int] = ()
        self._looked_at = -1
        self._at: float | None = None

    def sift(self, blocks: Iterable[Block]) -> Iterator[Line]:
        """The lines that come out."""
        for block in blocks:
            yield from self._block(block)
        yield from self._flush()

    def _block(self, block: Block) -> Iterator[Line]:
        keys = _squeezed(block.text).split(b"\n")
        self._lines, self._numbers, self._looked_at = block.text.split(b"\n"), block.numbers, -1
        if not block.text.isascii():
            _blank_binary(keys, self._lines)
        last = dict(zip(keys, range(len(keys)), strict=True))
        self._learn(keys, last)
        known = {key: self._keys[key] for key in last}
        self._count(keys, known, last)
        self._keys.kinds.num_bytes += block.num_bytes
        nans = set(_places_of(_NAN_COUNT, block.text))
        for place in self._places(keys, known, last, nans):
            key = keys[place]
            if known[key].progress and place not in nans:
                yield from self._step(place)
            else:
                yield from self._pass(key, place, telling=known[key].telling)
        self._pending = {key: self._line(it) if isinstance(it, int) else it for key, it in self._pending.items()}
        self._pass_time(len(keys) - 1)

    def _learn(self, keys: Sequence[bytes], distinct: Iterable[bytes]) -> None:
        if new := self._keys.new_among(distinct):
            first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
            for key in sorted(new, key=first.__getitem__):
                kind = self._keys.learn(key, self._lines[first[key]])
                if kind.first is None:
                    at = self._time(range(first[key], -1, -1))
                    kind.first = self._as_found(first[key], self._at if at is None else at)

    def _count(self, keys: Sequence[bytes], known: Mapping[bytes, Known], last: Mapping[bytes, int]) -> None:
        writer = self._file if self._rank is None else f"r{self._rank}"
        for key, count in Counter(keys).items():
            known[key].kind.add(count, (self._file, self._numbers[last[key]]), writer)

    def _places(
        self, keys: Sequence[bytes], known: Mapping[bytes, Known], last: Mapping[bytes, int], nans: set[int]
    ) -> list[int]:
        """Where lines are that may come out, with the iterations next to them."""
        told = {key for key, it in known.items() if not it.kind.noise}
        wanted = {key for key in told if not self._is_full(key) or (known[key].telling and self._has_new_codes(key, keys))}
        places = nans.union(_where(wanted, keys), (last[key] for key in told - wanted))
        steps = _where({key for key, it in known.items() if it.progress}, keys)
        return sorted(places.union(_beside(sorted(places), steps)))

    def _has_new_codes(self, key: bytes, keys: Sequence[bytes]) -> bool:
        """Whether any line with the key has a number that is new: all at once, which is quicker than one by one."""
        codes = _codes(b" ".join(compress(self._lines, map(key.__eq__, keys))))
        return not codes <= self._codes.get(hash(key), set())

    def _is_full(self, key: bytes) -> bool:
        return self._kept.get(hash(key), 0) >= FIRST_KEPT

    def _step(self, place: int) -> Iterator[Line]:
        if self._progress_owed:
            self._progress_owed -= 1
            yield self._line(place)
        else:
            self._num_progress += 1
            self._hold(self._num_progress % PROGRESS_KEPT, place)

    def _pass(self, key: bytes, place: int, *, telling: bool) -> Iterator[Line]:
        if self._keeps(key, self._lines[place], telling=telling):
            self._pending.pop(hash(key), None)
            yield from self._flush()
            self._progress_owed = PROGRESS_KEPT
            yield self._line(place)
        else:
            self._hold(hash(key), place)

    def _keeps(self, key: bytes, line: bytes, *, telling: bool) -> bool:
        if len(self._kept) > MAX_KEPT:
            self._kept.clear()
            self._codes.clear()
        which = hash(key)
        self._kept[which] = count = self._kept.get(which, 0) + 1
        if not telling:
            return count <= FIRST_KEPT
        known, codes = self._codes.setdefault(which, set()), _codes(line)
        new = not codes <= known
        known |= codes
        return new or count <= FIRST_KEPT

    def _hold(self, key: int, place: int) -> None:
        self._pending.pop(key, None)
        self._pending[key] = place
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def _flush(self) -> Iterator[Line]:
        pending, self._pending = self._pending, {}
        for it in pending.values():
            yield self._line(it) if isinstance(it, int) else it

    def _line(self, place: int) -> Line:
        """A line that comes out; they have to be asked for in their order."""
        self._pass_time(place)
        return self._as_found(place, self._at)

    def _pass_time(self, place: int) -> None:
        at = self._time(range(place, self._looked_at, -1))
        self._at = self._at if at is None else at
        self._looked_at = place

    def _as_found(self, place: int, at: float | None) -> Line:
        text = clean(self._lines[place])
        rank = rank_of_line(text)
        return Line(file=self._file, number=self._numbers[place], text=text, at=at, rank=self._rank if rank is None else rank)

    def _time(self, places: Sequence[int]) -> float | None:
        """The time of the first of these lines that has one; lines far away do not count."""
        near = places[: _LOOK_BACK + 1]
        heads = (head for place in near if b":" in (head := self._lines[place][:_LOOKED_AT]))
        times = (time_of(clean(head), self._reference) for head in heads)
        return next((at for at in times if at is not None), None)


def _codes(text: bytes) -> set[bytes]:
    """The numbers of up to three digits, but not those in times and fractions."""
    found = (it.strip(b".:-") for it in set(text.translate(_NUMBERS_ONLY).split()))
    return {it for it in found if len(it) <= 3 and it.isdigit()}


def _squeezed(text: bytes) -> bytes:
    return (_HEX.sub(b"0x", text) if b"0x" in text else text).translate(None, _IRRELEVANT)


def _blank_binary(keys: list[bytes], lines: list[bytes]) -> None:
    for place, line in enumerate(lines):
        if is_binary(line):
            keys[place], lines[place] = _BINARY_KEY, b""


def _where(wanted: set[bytes], keys: Sequence[bytes]) -> list[int]:
    return list(compress(range(len(keys)), map(wanted.__contains__, keys))) if wanted else []


def _beside(places: Sequence[int], steps: Sequence[int]) -> Iterator[int]:
    """Of the iterations in each gap between two places, the first few and the last few."""
    if not steps:
        return
    for before, after in pairwise([-1, *places, steps[-1] + 1]):
        gap = range(bisect_right(steps, before), bisect_left(steps, after))
        for step in {*gap[:PROGRESS_KEPT], *gap[-PROGRESS_KEPT:]}:
            yield steps[step]


def _places_of(pattern: re.Pattern[bytes], text: bytes) -> Iterator[int]:
    """The lines of a block that a pattern is found in."""
    line = end = 0
    for found in pattern.finditer(text):
        line += text.count(b"\n", end, found.start())
        end = found.start()
        yield line
