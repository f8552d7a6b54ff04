"""One incident and the logs of its ranks, diagnosed beside its recovery.

`python -m unicron_lib.diagnosis.case` reads a case as JSON and writes the event: in a process of its own, which yields to
everything else, no log and no rule can hold up the recoveries.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter

from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Diagnosis, Line
from unicron_lib.diagnosis.incidents import diagnose_incident, lines_of, past_of, with_similar
from unicron_lib.diagnosis.llm import LlmSettings, second_opinion
from unicron_lib.diagnosis.merge import merged
from unicron_lib.diagnosis.reading import Block, blocks
from unicron_lib.diagnosis.redaction import Redactor
from unicron_lib.diagnosis.rules import RULES, RuleSet
from unicron_lib.diagnosis.sightings import is_wanted
from unicron_lib.diagnosis.tails import Tail
from unicron_lib.diagnosis.teach import read_rules
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.failures import Failure

UNDER_WAY_S = 10.0
"""A plan that is carried out for so long waits for something: now a diagnosis is in nobody's way."""
RECENT_S = 3600.0
"""Of an older incident, the logs may be gone."""
MAX_LOGS = 8
MAX_PAST, MAX_PAST_FAILURES = 200, 8
"""Incidents that it is compared with, and failures of each."""
NUM_LAST = 100
_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What there is to know: the incident, the newest others, the logs, and which `unread` ones there would have been."""

    incident: Incident
    past: tuple[Incident, ...] = ()
    logs: tuple[Tail, ...] = ()
    unread: tuple[str, ...] = ()


case_json: TypeAdapter[Case] = TypeAdapter(Case)
diagnosed_json: TypeAdapter[IncidentDiagnosed] = TypeAdapter(IncidentDiagnosed)


def due(state: ClusterState, now: float) -> tuple[str, ...]:
    """The incidents that are to be diagnosed: not before their recovery is done, or waits for something; oldest first."""
    found = [it for it in state.incidents.values() if it.is_failure and it.diagnosis is None and _is_due(state, it, now)]
    return tuple(it.id for it in sorted(found, key=lambda it: (it.opened_at, it.id)))


def _is_due(state: ClusterState, incident: Incident, now: float) -> bool:
    if incident.status is IncidentStatus.CLOSED:
        return now - (incident.closed_at or incident.opened_at) < RECENT_S
    plan = state.plans.get(incident.plan or "")
    return incident.status is IncidentStatus.PLANNED and plan is not None and now - plan.decided_at > UNDER_WAY_S


def ranks_to_read(incident: Incident) -> tuple[Failure, ...]:
    """A failure of each rank whose log is to be read: the root cause, then those of its node, then in the order of times."""
    root = incident.root
    node = root.node if root else None
    ordered = sorted(incident.failures, key=lambda it: (it is not root, it.node != node, it.seen_at, it.id))
    first: dict[tuple[str, int, int], Failure] = {}
    for it in ordered:
        if it.job and it.node and it.generation is not None and it.rank is not None:
            first.setdefault((it.job, it.generation, it.rank), it)
    return tuple(first.values())[:MAX_LOGS]


def case_of(state: ClusterState, name: str, logs: tuple[Tail, ...], unread: tuple[str, ...]) -> Case:
    """The case of an incident. Raises KeyError for one that is not known."""
    others = (it for it in state.incidents.values() if it.is_failure and it.merged_into is None and it.id != name)
    newest = sorted(others, key=lambda it: it.opened_at)[-MAX_PAST:]
    past = tuple(replace(it, failures=it.failures[:MAX_PAST_FAILURES], diagnosis=None) for it in newest)
    return Case(incident=state.incidents[name], past=past, logs=logs, unread=unread)


def concluded(case: Case, *, at: float, rules: RuleSet | None = None, opinion: LlmSettings | None = None) -> IncidentDiagnosed:
    """Why it happened, journalled at `at` (epoch s): by logs and evidence, else by a past incident, else as it was detected.

    Raises ValueError for a damaged log.
    """
    incident = case.incident
    rules = rules or RuleSet()
    lines = list(_lines(case, rules))
    found = diagnose(lines, rules)
    last = tuple(deque(lines, NUM_LAST))
    past = past_of(ClusterState(incidents={it.id: it for it in case.past}))
    if opinion and found.verdict == "unknown":
        found = second_opinion(with_similar(found, past, last), last, opinion)
    else:
        found = with_similar(found, past, () if found.verdict == "fault" else last)
    if found.verdict != "fault":
        found = replace(diagnose_incident(incident, rules), similar=found.similar)
    return _event(case, found, at)


def _lines(case: Case, rules: RuleSet) -> Iterator[Line]:
    """Logs first, then what was seen: clocks of logs may be of another time zone, so the latter has no times."""
    evidence = (replace(line, at=None) for line in lines_of(case.incident))
    logs = ((it.file if it.first_line else f"{it.file} (its end)", _content(it)) for it in case.logs)
    return chain(merged(logs, case.incident.opened_at, partial(is_wanted, rules)), evidence)


def _content(tail: Tail) -> Iterator[Block]:
    before = max(tail.first_line - 1, 0)
    for block in blocks(iter([tail.unpacked()])):
        yield Block(block.text, [number + before for number in block.numbers], block.num_bytes)


def _event(case: Case, found: Diagnosis, at: float) -> IncidentDiagnosed:
    """Secrets do not go from a log into the journal."""
    clean = Redactor().clean_secrets
    return IncidentDiagnosed(
        id=f"diagnosed/{case.incident.id}",
        at=at,
        incident=case.incident.id,
        kind=str(found.kind),
        root_cause=clean(found.root_cause)[: 2 * _TEXT],
        source=found.source,
        recoverable=found.recoverable,
        confidence=round(found.confidence, 3),
        mitigation=found.mitigation,
        reason=clean(found.reason)[: 2 * _TEXT],
        evidence=tuple(f"{it.file}:{it.number}  {clean(it.text.strip())[:_TEXT]}" for it in found.evidence),
        similar=found.similar,
        unread=case.unread,
    )


def main() -> int:
    """A case on stdin, the event on stdout."""
    os.nice(19)
    taught = os.environ.get("UNICRON_RULES")
    rules = RuleSet((*read_rules(Path(taught) if taught else None), *RULES))
    case = case_json.validate_json(sys.stdin.buffer.read())
    told = concluded(case, at=time.time(), rules=rules, opinion=LlmSettings.from_env())
    sys.stdout.buffer.write(diagnosed_json.dump_json(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
