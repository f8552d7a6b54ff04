"""Which of the things that logs tell of is the cause of the others. Pure; it observes and decides nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from unicron_lib.diagnosis.echoes import without_echoes
from unicron_lib.diagnosis.findings import Diagnosis, Line, Sighting
from unicron_lib.diagnosis.merge import interesting
from unicron_lib.diagnosis.rules import CAUSE, ECHO, HARDWARE, HINTS, LINK, STUCK, VAGUE, RuleSet
from unicron_lib.diagnosis.sightings import Heard, hear, is_wanted
from unicron_lib.domain.failures import ErrorKind

GOES_ON = 3
"""Iterations that a job has to do after something before that counts as passed: peers may still finish one or two."""
GOES_ON_TOLD, GOES_ON_WARNED = 20, 100
"""The same after a signal to stop, and after a notice to leave: minutes pass before a spot instance is taken."""
GOES_ON_S = 120.0
"""The same in seconds, where another log tells of the iterations."""
LONG_PAST_S = 1800.0
"""Seconds after which what broke has nothing to do any more with how the job ended: NCCL has given up by then."""
STAYED_S = 600.0
"""Seconds after a notice to leave by which whoever it was for is gone."""
NUM_EVIDENCE, NUM_CASCADES = 4, 20

_CONFIDENCE = {HARDWARE: 0.95, CAUSE: 0.9, VAGUE: 0.7, LINK: 0.75, ECHO: 0.6, STUCK: 0.55}
_RIVALRY = 0.15
_LATE = 0.7
"""What programs print is buffered: a traceback may stand before iterations that were done before it."""
_OWN_EXCEPTION = 0.6
_NEVER_OF_HARDWARE = frozenset({ErrorKind.USER_ERROR, ErrorKind.STORAGE_ERROR, ErrorKind.PREEMPTED, ErrorKind.OUT_OF_MEMORY})
_CURED_BY_RETRY = frozenset(
    {ErrorKind.STORAGE_ERROR, ErrorKind.CONNECTION_REFUSED, ErrorKind.CONNECTION_RESET, ErrorKind.NETWORK_ERROR}
)
_ENDED = frozenset({ErrorKind.PROCESS_EXIT, ErrorKind.OTHER})


def diagnose(lines: Iterable[Line], rules: RuleSet | None = None) -> Diagnosis:
    """Why the job failed that wrote `lines`, if it did; lines of one file in its order, of several in the order of time."""
    return judged(hear(lines, rules))


def diagnose_files(paths: Sequence[Path], rules: RuleSet | None = None) -> Diagnosis:
    """The same of log files of any size. Raises OSError for one that cannot be read."""
    rules = rules or RuleSet()
    return diagnose(interesting(paths, partial(is_wanted, rules)), rules)


def judged(heard: Heard) -> Diagnosis:
    """The same of what was heard."""
    lasting = _without_idle_links([it for it in heard.sightings if not _passed(it, heard)], heard)
    ends = [it for it in lasting if it.rule.kind in _ENDED]
    if roots := without_echoes(_roots(lasting), ends):
        return _fault(_without_the_past(roots, heard), lasting, heard)
    if any(it.rule.name not in HINTS for it in ends) and (roots := without_echoes(_roots(heard.sightings), ends)):
        found = _fault(roots, heard.sightings, heard)
        doubt = "; iterations were told of after it, perhaps late, and nothing else explains the end"
        return replace(found, confidence=found.confidence * _LATE, reason=found.reason + doubt)
    return _unknown(ends) if ends else _healthy(heard)


def _roots(sightings: Iterable[Sighting]) -> list[Sighting]:
    return sorted((it for it in sightings if it.rule.role == "root"), key=lambda it: (it.weight, it.order))


def _passed(sighting: Sighting, heard: Heard) -> bool:
    """Whether the job went on after it, without a process that ended in between: then it was no failure."""
    file, kind = sighting.line.file, sighting.rule.kind
    after = heard.progress.get(file, 0) - sighting.progress
    if sighting.weight == HARDWARE:
        return False
    if kind is ErrorKind.PREEMPTED:
        return after >= (GOES_ON_WARNED if sighting.weight == CAUSE else GOES_ON_TOLD) or _is_stayed(sighting, heard)
    if heard.healed.get((sighting.rule.name, file), -1) > sighting.order:
        return True
    if sighting.weight >= ECHO and kind not in _ENDED and heard.done.get(file, sighting.order) < sighting.order:
        return True
    end = _next_end(sighting, heard)
    if end or kind is ErrorKind.PROCESS_EXIT:
        return end is not None and end.progress - sighting.progress >= GOES_ON
    return (
        after >= GOES_ON
        or (heard.done.get(file, -1) > sighting.order and not _is_all_that_follows(sighting, heard))
        or _is_cured(sighting, heard)
        or _is_outlived(sighting, heard)
    )


def _next_end(sighting: Sighting, heard: Heard) -> Sighting | None:
    ends = (it for it in heard.sightings if it.rule.kind is ErrorKind.PROCESS_EXIT and it.line.file == sighting.line.file)
    return next((it for it in ends if it.order > sighting.order), None)


def _is_stayed(sighting: Sighting, heard: Heard) -> bool:
    """Whether a notice was about others: the logs of the ranks tell of iterations long after it."""
    at, last = sighting.line.at, heard.progress_at
    return at is not None and last is not None and last - at > STAYED_S


def _is_all_that_follows(sighting: Sighting, heard: Heard) -> bool:
    """Whether the loss was no number any more until the end: a program that stops for that reason may say that it is done."""
    if sighting.rule.kind is not ErrorKind.LOSS_ANOMALY or sighting.rule.role != "root":
        return False
    file, progress = sighting.line.file, sighting.progress
    alike = (it for it in heard.sightings if it.rule is sighting.rule and it.line.file == file)
    return sum(it.progress == progress for it in alike) >= GOES_ON


def _is_cured(sighting: Sighting, heard: Heard) -> bool:
    """Whether the log tells that it worked when it was tried again."""
    return sighting.rule.kind in _CURED_BY_RETRY and heard.recovered.get(sighting.line.file, -1) > sighting.order


def _is_outlived(sighting: Sighting, heard: Heard) -> bool:
    """Whether other logs tell of iterations long after it; clocks may differ, so only what explains little is judged so."""
    at, last = sighting.line.at, heard.progress_at
    explains_little = sighting.weight >= VAGUE or sighting.rule.kind in _CURED_BY_RETRY
    return explains_little and at is not None and last is not None and last - at > GOES_ON_S


def _without_idle_links(lasting: list[Sighting], heard: Heard) -> list[Sighting]:
    """A flapping link explains what ranks complain about: if their logs are there and do not complain, it explains nothing."""
    if any(it.rule.kind is not ErrorKind.LINK_FLAPPING for it in lasting):
        return lasting
    steps = {file for file, count in heard.progress.items() if count >= GOES_ON}
    return [it for it in lasting if not steps or it.line.file in steps]


def _without_the_past(roots: list[Sighting], heard: Heard) -> list[Sighting]:
    """Hardware that broke long before explains nothing that has a cause of its own."""
    if roots[0].weight > HARDWARE or not any(it.rule.kind in _NEVER_OF_HARDWARE for it in roots):
        return roots
    return [it for it in roots if it.weight > HARDWARE or not _is_long_past(it, heard)]


def _is_long_past(sighting: Sighting, heard: Heard) -> bool:
    at, last = sighting.line.at, heard.progress_at
    outlived = at is not None and last is not None and last - at > LONG_PAST_S
    return outlived or heard.progress.get(sighting.line.file, 0) - sighting.progress >= GOES_ON_TOLD


def _fault(roots: list[Sighting], lasting: list[Sighting], heard: Heard) -> Diagnosis:
    root = roots[0]
    rule = root.rule
    rivals = sorted({str(it.rule.kind) for it in roots if it.weight == root.weight and it.rule.kind is not rule.kind})
    confidence = _OWN_EXCEPTION if rule.name == "own-exception" else _CONFIDENCE[root.weight]
    same = [it.line for it in lasting if it.rule.kind is rule.kind]
    shown = dict.fromkeys((root.line, *_begun(root, heard), *same))
    return Diagnosis(
        verdict="fault",
        kind=rule.kind,
        severity=rule.severity,
        root_cause=_told(root),
        source=rule.source,
        recoverable=rule.recoverable,
        evidence=tuple(shown)[:NUM_EVIDENCE],
        cascades=_cascades(root, lasting),
        confidence=confidence - (_RIVALRY if rivals else 0.0),
        mitigation=rule.mitigation,
        reason=_reason(root, rivals),
    )


def _begun(root: Sighting, heard: Heard) -> Iterator[Line]:
    """Where it began, if earlier: what passed at first, or was tried again."""
    kind, file = root.rule.kind, root.line.file
    progress, retried = heard.retried.get((kind, file), (0, None))
    if retried and root.progress - progress < GOES_ON_TOLD:
        yield retried
    earlier = (it for it in heard.sightings if it.rule.kind is kind and it.line.file == file and it.order < root.order)
    yield from (it.line for it in earlier if root.progress - it.progress < GOES_ON_TOLD)


def _told(root: Sighting) -> str:
    line = root.line
    rank = f" of rank {line.rank}" if line.rank is not None else ""
    where = f" ({root.where})" if root.where else ""
    return f"{line.text[:300]}{where}, {line.file}:{line.number}{rank}"


def _reason(root: Sighting, rivals: list[str]) -> str:
    why = {
        HARDWARE: "what hardware and kernel report explains all the rest, whenever it was written",
        ECHO: "nothing was found that would cause it: this is what the peers of a failed process report",
        STUCK: "nothing was found that would cause it: something else may have kept a rank from the collective",
    }.get(root.weight, "it is the first that can cause what followed")
    return why + (f"; as grave and later: {', '.join(rivals)}" if rivals else "")


def _cascades(root: Sighting, lasting: list[Sighting]) -> tuple[Sighting, ...]:
    """The first of each rule and file that the root explains."""
    first: dict[tuple[str, str], Sighting] = {}
    for it in lasting:
        if it.rule.kind is not root.rule.kind:
            first.setdefault((it.rule.kind, it.line.file), it)
    return tuple(first.values())[:NUM_CASCADES]


def _unknown(ends: list[Sighting]) -> Diagnosis:
    first = next((it for it in ends if it.rule.kind is ErrorKind.OTHER), ends[0])
    return Diagnosis(
        verdict="unknown",
        root_cause="unknown",
        evidence=tuple(it.line for it in [first, *(it for it in ends if it is not first)][:NUM_EVIDENCE]),
        mitigation="look at the evidence and at the logs of the other ranks and of the kernel",
        reason=f"the job failed ({_told(first)}), and nothing in these logs tells why",
    )


def _healthy(heard: Heard) -> Diagnosis:
    passed = sorted({str(it.rule.kind) for it in heard.sightings})
    dismissed = f"; the job went on after {', '.join(passed)}" if passed else ""
    return Diagnosis(verdict="healthy", reason=f"none of {heard.num_lines} lines tells of a failure{dismissed}")
