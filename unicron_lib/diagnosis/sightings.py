"""From the lines of logs to what they tell of failures and of progress, in bounded memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from unicron_lib.diagnosis.findings import Line, Rule, Sighting
from unicron_lib.diagnosis.rules import (
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
from unicron_lib.diagnosis.tracebacks import Raised, TracebackReader, is_of_traceback
from unicron_lib.diagnosis.wording import healed_by, is_done, is_harmless, is_mild, is_progress, parted
from unicron_lib.domain.failures import ErrorKind

KEPT = 40
"""Sightings of one rule in one file that are kept: half of them the first, half the last."""
MAX_PROCESSES = 4096
EXIT_TYPES = frozenset(
    {
        *("SystemExit", "KeyboardInterrupt", "CalledProcessError", "ChildFailedError", "SignalException"),
        *("ProcessExitedException", "ProcessRaisedException", "RendezvousClosedError", "RayTaskError", "WorkerCrashedError"),
    }
)
"""Exceptions that only tell that something ended."""
_HALF = KEPT // 2


@dataclass(slots=True)
class Heard:
    """All that was read.

    `progress` counts iterations by file; `done` has the order of the line that told of a file's good end, `healed` that of
    the last which told that a thing with a rule works again, by rule and file.
    """

    sightings: list[Sighting] = field(default_factory=list)
    progress: dict[str, int] = field(default_factory=dict)
    progress_at: float | None = None
    done: dict[str, int] = field(default_factory=dict)
    healed: dict[tuple[str, str], int] = field(default_factory=dict)
    num_lines: int = 0


def hear(lines: Iterable[Line], rules: RuleSet | None = None) -> Heard:
    """Read all lines; those of one file must come in its order, those of several in the order of time if it is known."""
    return _Listener(rules or RuleSet()).listen(lines)


def is_wanted(rules: RuleSet, text: str) -> bool:
    """Whether a line must not be left out: a rule is found in it, or it is needed to understand the lines around it."""
    text = parted(text)[1]
    if is_of_traceback(text) or is_done(text) or healed_by(text) or xid_in(text):
        return True
    return any(rule.role != "advice" for rule, _ in rules.matches(text))


class _Listener:
    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._heard = Heard()
        self._readers: dict[tuple[str, str | int], TracebackReader] = {}
        self._kept: dict[tuple[str, str], list[Sighting]] = defaultdict(list)

    def listen(self, lines: Iterable[Line]) -> Heard:
        for order, line in enumerate(lines):
            who, text = parted(line.text)
            for sighting in self._sightings(line, who, text, order):
                self._keep(sighting)
            self._follow(line, text, order)
        heard = self._heard
        heard.sightings = sorted((it for kept in self._kept.values() for it in kept), key=lambda it: it.order)
        return heard

    def _follow(self, line: Line, text: str, order: int) -> None:
        heard = self._heard
        heard.num_lines += 1
        if is_progress(text):
            heard.progress[line.file] = heard.progress.get(line.file, 0) + 1
            if line.at is not None:
                heard.progress_at = max(line.at, heard.progress_at or line.at)
        elif is_done(text):
            heard.done[line.file] = order
        elif name := healed_by(text):
            heard.healed[name, line.file] = order

    def _keep(self, sighting: Sighting) -> None:
        kept = self._kept[sighting.rule.name, sighting.line.file]
        if len(kept) >= KEPT:
            del kept[_HALF]
        kept.append(sighting)

    def _sightings(self, line: Line, who: str, text: str, order: int) -> Iterator[Sighting]:
        reader = self._reader(line, who)
        raised = reader.read(text)
        if reader.is_inside and text[:1].isspace():
            return
        found = self._told(raised, text) if raised else self._said(text)
        where = raised.where if raised else ""
        for rule, weight in found:
            progress = self._heard.progress.get(line.file, 0)
            clean = replace(line, text=text.strip())
            yield Sighting(line=clean, rule=rule, weight=weight, order=order, progress=progress, where=where)

    def _reader(self, line: Line, who: str) -> TracebackReader:
        if len(self._readers) > MAX_PROCESSES:
            self._readers.clear()
        return self._readers.setdefault((line.file, who or (line.rank if line.rank is not None else "")), TracebackReader())

    def _said(self, text: str) -> Iterator[tuple[Rule, int]]:
        """What a line tells that ends no traceback."""
        if xid := xid_in(text):
            if xid[0].role != "advice":
                yield xid
            return
        matches = self._rules.matches(text)
        advice = min((start for rule, start in matches if rule.role == "advice"), default=len(text))
        told = [rule for rule, start in matches if start < advice]
        mild, harmless = bool(told) and is_mild(text), bool(told) and is_harmless(text)
        for rule in told:
            if rule.name in WAITING or not (harmless or (mild and not may_be_mild(rule))):
                yield rule, weight_of(rule)

    def _told(self, raised: Raised, text: str) -> Iterator[tuple[Rule, int]]:
        """What an exception tells: its type and the shape of its text decide, a rule of that kind only refines it."""
        if not raised.heard:
            return
        if raised.type in EXIT_TYPES:
            yield from self._said(text)
            yield rule_of("exit", ErrorKind.PROCESS_EXIT, "cascade"), FOLLOWS
            return
        matches = [rule for rule, _ in self._rules.matches(text) if rule.role == "root"]
        taught = [rule for rule in matches if rule.name.startswith(TAUGHT)]
        if raised.kind is ErrorKind.OTHER or taught:
            rule = next(iter(taught or matches), _of_nobody(raised))
        else:
            rule = next((it for it in matches if it.kind is raised.kind), rule_of("exception", raised.kind))
        weight = weight_of(rule)
        yield rule, max(weight, VAGUE) if raised.in_thread or rule.name == "own-exception" else weight


def _of_nobody(raised: Raised) -> Rule:
    """An exception that no table knows: the program's own, if its own code raised it."""
    if raised.users and raised.type not in {"RuntimeError", "Exception"}:
        return rule_of("own-exception", ErrorKind.USER_ERROR)
    return rule_of("unknown-exception", ErrorKind.OTHER, "cascade")
