"""What diagnosis speaks in: lines of logs, rules about them, and what they come to."""

from dataclasses import dataclass, field
from typing import Any, Literal

from unicron_lib.domain.failures import ErrorKind, Severity, severity_name

Role = Literal["root", "cascade", "advice"]
"""A root can be the cause of a failure, a cascade follows from one, advice only talks about one."""
Source = Literal["infrastructure", "user", "unknown"]
"""Whose fault a failure is."""
Verdict = Literal["fault", "healthy", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log. `number` counts from 1; `at` is epoch seconds and `rank` a torch rank, where the log tells them."""

    file: str
    number: int
    text: str
    at: float | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Lines that `pattern` is found in tell of `kind`. `example` is such a line."""

    name: str
    kind: ErrorKind
    role: Role
    source: Source
    recoverable: bool
    severity: Severity | None
    pattern: str
    mitigation: str
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A line that tells of a kind of failure. `weight` says how much it explains: the least explains the others.

    `order` counts the lines of all logs in the order read, `progress` the iterations that its file told of before it.
    `where` is the line of code that raised it, if a traceback tells. `timed`: the line tells its time itself, it is not
    only known to be no earlier than the lines before it.
    """

    line: Line
    rule: Rule
    weight: int
    order: int
    progress: int = 0
    where: str = ""
    timed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a job failed, with what shows it. `kind` is None if it did not fail or nothing tells why: see `verdict`.

    `confidence` is between 0 and 1: our own judgement of the evidence, no frequency.
    """

    verdict: Verdict
    kind: ErrorKind | None = None
    severity: Severity | None = None
    root_cause: str = ""
    source: Source = "unknown"
    recoverable: bool = True
    evidence: tuple[Line, ...] = ()
    cascades: tuple[Sighting, ...] = ()
    confidence: float = 0.0
    mitigation: str = ""
    reason: str = ""
    similar: tuple[str, ...] = field(default=())


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The answer of `unicron diagnose --json`."""
    return {
        "kind": diagnosis.kind,
        "severity": severity_name(diagnosis.severity) if diagnosis.severity else None,
        "root_cause": diagnosis.root_cause,
        "source": diagnosis.source,
        "recoverable": diagnosis.recoverable,
        "evidence": [_of_line(line) for line in diagnosis.evidence],
        "cascades": [{"kind": it.rule.kind, **_of_line(it.line)} for it in diagnosis.cascades],
        "verdict": diagnosis.verdict,
        "confidence": round(diagnosis.confidence, 3),
        "mitigation": diagnosis.mitigation,
        "reason": diagnosis.reason,
        "similar": list(diagnosis.similar),
    }


def _of_line(line: Line) -> dict[str, Any]:
    return {"file": line.file, "line": line.number, "text": line.text[:1000]}
