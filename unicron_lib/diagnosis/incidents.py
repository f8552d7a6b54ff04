"""What the journal knows of incidents, as logs to diagnose and as past ones to compare with."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Diagnosis, Line
from unicron_lib.diagnosis.rules import RULES, RuleSet, rule_of
from unicron_lib.diagnosis.similar import Past, nearest
from unicron_lib.diagnosis.wording import is_progress
from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.failures import ErrorKind

ALIKE = 0.6
"""A past incident this much alike lends its kind to a failure that no rule explains."""
_LENT = 0.5
_ENDINGS = RuleSet(rule for rule in RULES if rule.role != "root")


def lines_of(incident: Incident) -> Iterator[Line]:
    """The evidence of an incident's failures, oldest first."""
    for failure in sorted(incident.failures, key=lambda it: it.seen_at):
        where = failure.node or "?"
        file = f"{where}/rank{failure.rank}" if failure.rank is not None else where
        for number, text in enumerate(failure.evidence.splitlines(), 1):
            yield Line(file=file, number=number, text=text, at=failure.seen_at, rank=failure.rank)


def diagnose_incident(incident: Incident, rules: RuleSet | None = None) -> Diagnosis:
    """Why it happened, by its failures' own words; where they say nothing, by what the recovery took it for."""
    found = diagnose(lines_of(incident), rules)
    kind = ErrorKind(incident.kind)
    if found.verdict == "fault":
        also = "" if found.kind is kind else f"; the recovery took it for {kind}"
        return replace(found, reason=found.reason + also)
    rule = rule_of("recovery", kind)
    return Diagnosis(
        verdict="fault",
        kind=kind,
        severity=incident.severity,
        root_cause=f"{kind}, as it was detected",
        source=rule.source,
        recoverable=rule.recoverable,
        evidence=tuple(lines_of(incident))[:4],
        confidence=_LENT,
        mitigation=rule.mitigation,
        reason="no log tells more than the recovery knew",
    )


def remembered(incident: Incident) -> Diagnosis | None:
    """What was journalled of why it happened, from the logs that were there then; None if nothing was."""
    told = incident.diagnosis
    if told is None:
        return None
    rule = rule_of("journal", ErrorKind(told.kind))
    return Diagnosis(
        verdict="fault",
        kind=rule.kind,
        severity=rule.severity,
        root_cause=told.root_cause,
        source=told.source,
        recoverable=told.recoverable,
        evidence=tuple(_line(text) for text in told.evidence),
        confidence=told.confidence,
        mitigation=told.mitigation,
        reason=told.reason + ("" if told.kind == incident.kind else f"; the recovery took it for {incident.kind}"),
        similar=told.similar,
    )


def _line(text: str) -> Line:
    """A line of evidence as it was journalled, `FILE:LINE  TEXT`."""
    where, _, said = text.partition("  ")
    file, _, number = where.rpartition(":")
    return Line(file=file, number=int(number) if number.isdecimal() else 0, text=said)


def past_of(state: ClusterState, *, but: str = "") -> tuple[Past, ...]:
    """The incidents of failures that the journal knows, without the one with the id `but`."""
    told = (it for it in state.incidents.values() if it.is_failure and it.merged_into is None and it.id != but)
    return tuple(Past(id=it.id, kind=ErrorKind(it.kind), text=_characteristic(lines_of(it))) for it in told)


def _characteristic(lines: Iterable[Line]) -> str:
    """What is peculiar to a failure: that processes end and iterations are done is said of all."""
    return "\n".join(line.text for line in lines if not is_progress(line.text) and not _ENDINGS.matches(line.text))


def with_similar(found: Diagnosis, past: Sequence[Past], lines: Iterable[Line] = ()) -> Diagnosis:
    """The diagnosis with past incidents that read like its evidence and `lines`, the last of the logs.

    One that is much alike lends its kind where no rule has one.
    """
    if found.verdict == "healthy" or not past:
        return found
    alike = nearest(_characteristic(dict.fromkeys((*found.evidence, *lines))), past)
    found = replace(found, similar=tuple(it.past.id for it in alike))
    if not alike or found.verdict == "fault" or alike[0].share < ALIKE:
        return found
    best = alike[0]
    rule = rule_of("similar", best.past.kind)
    return replace(
        found,
        verdict="fault",
        kind=rule.kind,
        severity=rule.severity,
        source=rule.source,
        recoverable=rule.recoverable,
        mitigation=rule.mitigation,
        root_cause=f"as in {best.past.id}",
        confidence=_LENT * best.share,
        reason=f"{found.reason}; it reads like {best.past.id} ({best.share:.0%} alike), which was {rule.kind}",
    )
