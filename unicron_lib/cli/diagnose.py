"""`unicron diagnose`: why a job failed, read off logs or the journal. It observes; only the recovery acts."""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.options import AsJson, console, print_json
from unicron_lib.errors import UnicronError, UserError

if TYPE_CHECKING:
    from unicron_lib.diagnosis.findings import Diagnosis, Rule
    from unicron_lib.diagnosis.rules import RuleSet
    from unicron_lib.diagnosis.similar import Past
    from unicron_lib.domain.cluster import ClusterState, Incident

Targets = Annotated[
    list[str],
    typer.Argument(metavar="FILE...|JOB|INCIDENT", help="Logs of one job, all its ranks and kernels; or what the journal has."),
]
Rules = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", envvar="UNICRON_RULES", help="Rules that were taught; --confirm adds to it."),
]
Confirm = Annotated[str | None, typer.Option("--confirm", metavar="KIND", help="Teach: the line --line of FILE tells of KIND.")]
LineNumber = Annotated[int, typer.Option("--line", metavar="N", min=0, help="With --confirm: the line that shows it.")]
Pattern = Annotated[str, typer.Option("--rule", metavar="REGEX", help="With --confirm: what such lines have in common.")]
Corpus = Annotated[
    Path | None, typer.Option("--corpus", metavar="LABELS", help="With --confirm: logs that must be told as rightly as before.")
]

Page = Annotated[
    bool, typer.Option("--page", help="Show the logs as a page that a person, or a model, can read; judge nothing.")
]

NUM_LAST = 100
"""Lines of the logs that are compared with past incidents, and shown to a model."""


def diagnose(
    targets: Targets,
    as_json: AsJson = False,
    rules: Rules = None,
    confirm: Confirm = None,
    line: LineNumber = 0,
    rule: Pattern = "",
    corpus: Corpus = None,
    page: Page = False,
) -> None:
    """Say why a job failed: the root cause, what shows it, what followed from it, what to do.

    Exit code 0 whatever the answer, "unknown" among them; 2 for what is no log, job or incident.
    """
    if page:
        _show_page(targets, as_json=as_json)
        return
    if confirm is not None:
        _teach(targets, confirm, line, rule, rules, corpus, as_json=as_json)
        return
    found = _found(targets, rules)
    if as_json:
        from unicron_lib.diagnosis.findings import as_json as told

        print_json(told(found))
    else:
        _show(found)


def _show_page(targets: list[str], *, as_json: bool) -> None:
    """The logs, each kind of line once."""
    from unicron_lib.diagnosis.compress import compress

    paths = _logs_of(targets)
    if not paths:
        raise UserError(f"there is no log {targets[0]}: --page reads files")
    try:
        text = compress(paths)
    except OSError as error:
        raise _unreadable(error, paths) from error
    if as_json:
        print_json({"page": text.splitlines()})
    else:
        console().print(text, markup=False, highlight=False, soft_wrap=True)


def _logs_of(targets: list[str]) -> list[Path]:
    """The logs that the targets name; none if they name no files. Raises UserError if only some exist."""
    paths = [path for target in targets for path in logs_at(Path(target))]
    if paths and (missing := [target for target in targets if not Path(target).exists()]):
        raise UserError(f"there is no log {missing[0]}")
    return paths


def _unreadable(error: OSError, paths: list[Path]) -> UserError:
    return UserError(f"{error.filename or paths[0]} cannot be read: {error.strerror or error}")


def _found(targets: list[str], rules_file: Path | None) -> "Diagnosis":
    from unicron_lib.diagnosis.rules import RULES, RuleSet
    from unicron_lib.diagnosis.teach import read_rules

    rules = RuleSet((*read_rules(rules_file), *RULES))
    if paths := _logs_of(targets):
        return of_files(paths, rules)
    if len(targets) > 1 or "/" in targets[0]:
        raise UserError(f"there is no log {targets[0]}: name files, or one job or incident")
    return of_journal(targets[0], rules)


def logs_at(path: Path) -> list[Path]:
    """The logs that a path names: itself, or the files in a directory."""
    return sorted(it for it in path.iterdir() if it.is_file()) if path.is_dir() else [path] if path.exists() else []


def of_files(paths: list[Path], rules: "RuleSet") -> "Diagnosis":
    """What log files tell; where no rule knows, what a past incident lends, then a second opinion if one is configured."""
    from unicron_lib.diagnosis.diagnose import diagnose_files
    from unicron_lib.diagnosis.incidents import with_similar
    from unicron_lib.diagnosis.llm import LlmSettings, second_opinion
    from unicron_lib.diagnosis.merge import interesting

    try:
        found = diagnose_files(paths, rules)
        if found.verdict != "unknown":
            return found
        last = deque(interesting(paths), NUM_LAST)
        found = with_similar(found, known_past(), last)
        settings = LlmSettings.from_env()
        return second_opinion(found, last, settings) if settings else found
    except OSError as error:
        raise _unreadable(error, paths) from error


def known_past() -> "tuple[Past, ...]":
    """The incidents of the cluster that commands speak to; none if there is none, or its journal is out of reach."""
    from unicron_lib.cli.look import read_state
    from unicron_lib.cli.target import find_target
    from unicron_lib.diagnosis.incidents import past_of

    try:
        return past_of(read_state(find_target()))
    except UnicronError:
        return ()


def of_journal(name: str, rules: "RuleSet") -> "Diagnosis":
    """What the journal tells of an incident, or of the newest of a job, and which past ones were like it."""
    from unicron_lib.cli.look import read_state
    from unicron_lib.cli.target import find_target
    from unicron_lib.diagnosis.incidents import diagnose_incident, past_of, remembered, with_similar

    state = read_state(find_target())
    incident = incident_of(state, name)
    found = with_similar(diagnose_incident(incident, rules), past_of(state, but=incident.id))
    kept = remembered(incident)
    return kept if kept and kept.confidence >= found.confidence else found


def incident_of(state: "ClusterState", name: str) -> "Incident":
    """The incident whose id begins so, or the newest failure of the job called so. Raises UserError if there is none."""
    failures = [it for it in state.incidents.values() if it.is_failure and it.merged_into is None]
    if name in state.jobs:
        failures = [it for it in failures if name in it.jobs]
        if not failures:
            raise UserError(f"{name} has had no failure")
        return max(failures, key=lambda it: it.opened_at)
    matching = [it for it in failures if it.id.startswith(name)]
    if len(matching) != 1:
        raise UserError(f"{name} is no log and no job, and {len(matching)} incidents match it")
    return matching[0]


def _teach(
    targets: list[str], kind: str, number: int, pattern: str, rules: Path | None, corpus: Path | None, *, as_json: bool
) -> None:
    from unicron_lib.diagnosis.teach import add_rule, check, read_corpus, read_rules

    if not (rules and number and pattern and len(targets) == 1):
        raise UserError("--confirm needs one FILE, --line, --rule and --rules")
    rule = _confirmed(Path(targets[0]), kind, number, pattern)
    tried = check(rule, read_rules(rules), read_corpus(corpus)) if corpus else 0
    add_rule(rules, rule)
    if as_json:
        print_json({"rule": rule.name, "kind": rule.kind, "pattern": rule.pattern, "cases": tried})
    else:
        console().print(
            f"{rules} has a rule more: {rule.kind}. {tried} labelled logs are told as rightly as before.", markup=False
        )


def _confirmed(path: Path, kind: str, number: int, pattern: str) -> "Rule":
    from itertools import islice

    from unicron_lib.diagnosis.teach import taught
    from unicron_lib.domain.failures import ErrorKind

    if kind not in set(ErrorKind):
        raise UserError(f"{kind} is no kind of failure: {', '.join(ErrorKind)}")
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            line = next(islice(stream, number - 1, None), None)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if line is None:
        raise UserError(f"{path} has no line {number}")
    return taught(ErrorKind(kind), pattern, line)


def _show(found: "Diagnosis") -> None:
    from unicron_lib.domain.failures import severity_name

    screen = console()
    if found.verdict != "fault":
        screen.print(f"{found.verdict}: {found.reason}", markup=False, highlight=False, soft_wrap=True)
    else:
        head = f"{found.kind} ({severity_name(found.severity)}, {found.source}), confidence {found.confidence:.0%}"
        again = "a restart can help" if found.recoverable else "a restart will not help"
        for text in (head, f"because: {found.root_cause}", f"judged so: {found.reason}", f"to do: {found.mitigation}; {again}"):
            screen.print(text, markup=False, highlight=False, soft_wrap=True)
    rows = [("shown by", it) for it in found.evidence] + [(f"then {it.rule.kind}", it.line) for it in found.cascades]
    for what, line in rows:
        screen.print(
            f"  {what}: {line.file}:{line.number}  {line.text.strip()[:200]}", markup=False, highlight=False, soft_wrap=True
        )
    if found.similar:
        screen.print(f"like: {', '.join(found.similar)}", markup=False, highlight=False)
