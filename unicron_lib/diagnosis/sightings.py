"""From the lines of logs to what they tell of failures and of progress, in bounded memory."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from unicron_lib.diagnosis.findings import Line, Rule, Sighting
from unicron_lib.diagnosis.prefixes import Prefixes, parted, spoken
from unicron_lib.diagnosis.rules import (
    CUT,
    FOLLOWS,
    TAUGHT,
    VAGUE,
    WAITING,
    RuleSet,
    may_be_mild,
    rule_of,
    weight_of,
    xid_in,
)
from unicron_lib.diagnosis.times import time_of
from unicron_lib.diagnosis.tracebacks import Raised, TracebackReader, is_of_traceback
from unicron_lib.diagnosis.wording import (
    has_recovered,
    healed_by,
    is_done,
    is_harmless,
    is_mild,
    is_progress,
    is_retried,
    is_warning,
    step_of,
)
from unicron_lib.domain.failures import ErrorKind

KEPT = 40
"""Sightings of one rule in one file that are kept: half of them the first, half the last."""
MAX_PROCESSES = 4096
_HEAD = 80
"""Characters by whose letters lines about iterations are told apart."""
EXIT_TYPES = frozenset(
    {
        *("SystemExit", "KeyboardInterrupt", "CalledProcessError", "ChildFailedError", "SignalException"),
        *("ProcessExitedException", "ProcessRaisedException", "RendezvousClosedError", "RayTaskError", "WorkerCrashedError"),
    }
)
"""Exceptions that only tell that something ended."""
_UNSPECIFIC = frozenset({ErrorKind.OTHER, ErrorKind.CUDA_ERROR})
_HALF = KEPT // 2
_SOUNDS_FOREIGN = re.compile(
    r"(?i:peer|node|host|network|socket|connect|heartbeat|watchdog|time(?:d ?)?-?out|unreachable|unavailable|lost|gone|"
    r"dead\b|died|upload|download|storage|bucket|server|quota|preempt|evict|interrupt|signal|hung|stall|stuck|nccl|cuda|gpu|nvlink|worker)"
)
"""Words with which programs tell of what surrounds them: an exception of their own with such a word is not taken for theirs."""
_CUT = rule_of(CUT, ErrorKind.OTHER, "cascade")
"""A traceback without an end: something was raised, nobody knows what."""


@dataclass(slots=True)
class Heard:
    """All that was read.

    `progress` counts iterations by file, by the step where steps are told; `done` has the order of the line that told of a
    file's good end, `recovered` that of the last which told that something worked when tried again, `healed` that of the
    last which told that a thing with a rule works again, by rule and file. `retried` is, by kind and file, the first of the
    newest lines that tell of something that is tried again, with the iterations before it.
    """

    sightings: list[Sighting] = field(default_factory=list)
    progress: dict[str, int] = field(default_factory=dict)
    progress_at: float | None = None
    done: dict[str, int] = field(default_factory=dict)
    recovered: dict[str, int] = field(default_factory=dict)
    healed: dict[tuple[str, str], int] = field(default_factory=dict)
    retried: dict[tuple[ErrorKind, str], tuple[int, Line]] = field(default_factory=dict)
    num_lines: int = 0


def hear(lines: Iterable[Line], rules: RuleSet | None = None) -> Heard:
    """Read all lines; those of one file must come in its order, those of several in the order of time if it is known."""
    return _Listener(rules or RuleSet()).listen(lines)


def is_wanted(rules: RuleSet, text: str) -> bool:
    """Whether a line must not be left out: a rule is found in it, or it is needed to understand the lines around it."""
    bare = parted(text)[1]
    return any(_is_wanted(rules, it) for it in {*spoken(bare), bare})


def _is_wanted(rules: RuleSet, text: str) -> bool:
    if is_of_traceback(text) or is_done(text) or has_recovered(text) or healed_by(text) or xid_in(text):
        return True
    return any(rule.role != "advice" for rule, _ in rules.matches(text))


def _is_a_warning(rule: Rule, text: str) -> bool:
    """Whether a line that sounds like a user's mistake only warns of one: what stops a job must be no guess."""
    return rule.kind is ErrorKind.USER_ERROR and is_warning(text)


class Steps:
    """Counts iterations whose lines may have been left out: the numbers that they give tell how many."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[int, int]] = {}

    def since_last(self, file: str, text: str) -> int:
        """How many lines like this one a file had since the last that was seen, this one among them."""
        step = step_of(text)
        if step is None:
            return 1
        key = file, "".join(it for it in text[:_HEAD] if it.isalpha())
        if len(self._last) > MAX_PROCESSES:
            self._last.clear()
        last, apart = self._last.get(key, (step, 0))
        gap = step - last
        apart = min(filter(None, (apart, gap)), default=0) if gap > 0 else apart
        self._last[key] = step, apart
        return gap // apart if gap > 0 else 1


class _Listener:
    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._heard = Heard()
        self._prefixes: dict[str, Prefixes] = defaultdict(Prefixes)
        self._readers: dict[tuple[str, str | int], TracebackReader] = {}
        self._begun: dict[tuple[str, str | int], Sighting] = {}
        self._steps = Steps()
        self._kept: dict[tuple[str, str], list[Sighting]] = defaultdict(list)

    def listen(self, lines: Iterable[Line]) -> Heard:
        for order, line in enumerate(lines):
            self._hear(line, order)
        for key, begun in self._begun.items():
            if self._readers[key].is_inside and self._readers[key].is_heard:
                self._keep(begun)
        heard = self._heard
        heard.sightings = sorted((it for kept in self._kept.values() for it in kept), key=lambda it: it.order)
        return heard

    def _hear(self, line: Line, order: int) -> None:
        who, bare = parted(line.text)
        texts = [self._prefixes[line.file].parted(text) for text in spoken(bare)]
        told = [it for more, text in texts for it in self._sightings(line, who + more, text, order)]
        if not told and texts != [("", bare)]:
            told = [self._sighting(line, bare, order, rule, weight) for rule, weight in self._said(line, bare)]
        for sighting in told:
            self._keep(sighting)
        self._heard.num_lines += 1
        self._follow(line, [*(text for _, text in texts), bare], order)

    def _follow(self, line: Line, texts: Sequence[str], order: int) -> None:
        heard = self._heard
        if step := next(filter(is_progress, texts), None):
            heard.progress[line.file] = heard.progress.get(line.file, 0) + self._steps.since_last(line.file, step)
            if line.at is not None:
                heard.progress_at = max(line.at, heard.progress_at or line.at)
        elif any(map(is_done, texts)):
            heard.done[line.file] = order
        elif name := next(filter(None, map(healed_by, texts)), None):
            heard.healed[name, line.file] = order
        if any(map(has_recovered, texts)):
            heard.recovered[line.file] = order

    def _keep(self, sighting: Sighting) -> None:
        kept = self._kept[sighting.rule.name, sighting.line.file]
        if len(kept) >= KEPT:
            del kept[_HALF]
        kept.append(sighting)

    def _sightings(self, line: Line, who: str, text: str, order: int) -> Iterator[Sighting]:
        key, reader = self._reader(line, who)
        was_inside = reader.is_inside
        raised = reader.read(text)
        if reader.is_inside and not was_inside:
            self._begun[key] = self._sighting(line, text, order, _CUT, FOLLOWS)
        if reader.quotes(text):
            return
        if reader.is_cut and reader.is_heard:
            yield self._begun[key]
        for rule, weight in self._told(raised, line, text) if raised else self._said(line, text):
            yield self._sighting(line, text, order, rule, weight, raised.where if raised else "")

    def _sighting(self, line: Line, text: str, order: int, rule: Rule, weight: int, where: str = "") -> Sighting:
        progress = self._heard.progress.get(line.file, 0)
        clean = replace(line, text=text.strip())
        timed = line.at is not None and time_of(line.text, line.at) is not None
        return Sighting(line=clean, rule=rule, weight=weight, order=order, progress=progress, where=where, timed=timed)

    def _reader(self, line: Line, who: str) -> tuple[tuple[str, str | int], TracebackReader]:
        if len(self._readers) > MAX_PROCESSES:
            self._readers.clear()
            self._begun.clear()
        key = line.file, who.strip() or (line.rank if line.rank is not None else "")
        return key, self._readers.setdefault(key, TracebackReader())

    def _said(self, line: Line, text: str) -> Iterator[tuple[Rule, int]]:
        """What a line tells that ends no traceback."""
        if xid := xid_in(text):
            if xid[0].role != "advice":
                yield xid
            return
        matches = self._rules.matches(text)
        advice = min((start for rule, start in matches if rule.role == "advice"), default=len(text))
        told = [rule for rule, start in matches if start < advice]
        mild, harmless = bool(told) and (is_mild(text) or is_mild(line.text)), bool(told) and is_harmless(text)
        for rule in told:
            if rule.name in WAITING or not (harmless or (mild and not may_be_mild(rule)) or _is_a_warning(rule, text)):
                yield rule, weight_of(rule)
            elif harmless and rule.role == "root" and is_retried(text):
                self._keep_retried(rule, line, text)

    def _keep_retried(self, rule: Rule, line: Line, text: str) -> None:
        key, progress = (rule.kind, line.file), self._heard.progress.get(line.file, 0)
        if key not in self._heard.retried or self._heard.retried[key][0] != progress:
            self._heard.retried[key] = progress, replace(line, text=text.strip())

    def _told(self, raised: Raised, line: Line, text: str) -> Iterator[tuple[Rule, int]]:
        """What an exception tells: its type and the shape of its text decide, a rule of that kind only refines it."""
        if not raised.heard:
            return
        if raised.type in EXIT_TYPES:
            yield from self._said(line, text)
            yield rule_of("exit", ErrorKind.PROCESS_EXIT, "cascade"), FOLLOWS
            return
        matches = [rule for rule, _ in self._rules.matches(text) if rule.role == "root"]
        taught = [rule for rule in matches if rule.name.startswith(TAUGHT)]
        if raised.kind in _UNSPECIFIC or taught:
            rule = min(taught or matches, key=weight_of, default=_of_nobody(raised))
        else:
            rule = next((it for it in matches if it.kind is raised.kind), rule_of("exception", raised.kind))
        weight = weight_of(rule)
        yield rule, max(weight, VAGUE) if raised.in_thread or rule.name == "own-exception" else weight


def _is_the_programs(raised: Raised) -> bool:
    """Whether the type is defined in the program that raised it: its module stands in the path, or is the main one."""
    package = raised.module.partition(".")[0]
    return raised.type not in {"RuntimeError", "Exception"} and (not package or package in raised.where)


def _of_nobody(raised: Raised) -> Rule:
    """An exception that no table knows: the program's own, if its own code raised it."""
    if raised.kind is not ErrorKind.OTHER:
        return rule_of("exception", raised.kind)
    if raised.users and _is_the_programs(raised) and not _SOUNDS_FOREIGN.search(f"{raised.type} {raised.text}"):
        return rule_of("own-exception", ErrorKind.USER_ERROR)
    return rule_of("unknown-exception", ErrorKind.OTHER, "cascade")
