"""Rules that operators teach: kept in a file of theirs, one JSON object a line, and taken only if they can do no harm."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from unicron_lib.diagnosis.diagnose import diagnose_files
from unicron_lib.diagnosis.findings import Diagnosis, Rule
from unicron_lib.diagnosis.patterns import is_bomb, needles
from unicron_lib.diagnosis.prefixes import parted
from unicron_lib.diagnosis.rules import RULES, TAUGHT, RuleSet, rule_of
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError

MAX_WAYS = 10_000
"""Stricter than for our own rules, which were measured."""
MIN_TEXT = 4
MAX_PATTERN = 400
"""Characters of plain text that a rule must need, and of a rule at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Logs of a known failure: `kind` is None for a healthy job and "unknown" for one whose logs do not tell."""

    name: str
    files: tuple[Path, ...]
    kind: str | None


def taught(kind: ErrorKind, pattern: str, line: str) -> Rule:
    """The rule that `pattern` tells of `kind`, as `line` does. Raises UserError, in a sentence, for one that will not do."""
    if len(pattern) > MAX_PATTERN:
        raise UserError(f"the regular expression has {len(pattern)} characters, {MAX_PATTERN} are allowed")
    try:
        compiled, bomb = re.compile(pattern), is_bomb(pattern, MAX_WAYS)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{pattern!r} is no regular expression: {error}") from None
    if bomb:
        raise UserError(f"{pattern!r} may take forever on some lines: bound its repetitions, as in [^,]{{1,40}}")
    text = parted(line)[1]
    if not compiled.search(text):
        raise UserError(f"{pattern!r} is not found in the line it is meant for: {text.strip()[:160]}")
    if compiled.search("") or not any(len(needle) >= MIN_TEXT for needle in needles(pattern)):
        raise UserError(
            f"{pattern!r} is too general: it needs at least {MIN_TEXT} characters of plain text in all of its branches"
        )
    digest = hashlib.sha256(f"{kind} {pattern}".encode()).hexdigest()[:8]
    return replace(rule_of(f"{TAUGHT}{digest}", kind), pattern=pattern, example=text.strip())


def check(rule: Rule, known: Iterable[Rule], corpus: Iterable[Case]) -> int:
    """How many cases were tried. Raises UserError if one that was diagnosed rightly would not be with `rule`."""
    known = tuple(known)
    before, after = RuleSet((*RULES, *known)), RuleSet((rule, *RULES, *known))
    tried = 0
    for case in corpus:
        tried += 1
        with_rule = answer_of(diagnose_files(case.files, after))
        if with_rule != case.kind and answer_of(diagnose_files(case.files, before)) == case.kind:
            raise UserError(
                f"with {rule.pattern!r} the logs of {case.name} would be called {with_rule or 'healthy'}: {case.kind} is right"
            )
    return tried


def answer_of(found: Diagnosis) -> str | None:
    """A diagnosis in the words of a corpus's labels."""
    return "unknown" if found.verdict == "unknown" else found.kind


def read_corpus(labels: Path) -> Iterator[Case]:
    """The cases that a YAML file names: `NAME: {kind: ..., files: [...]}`, logs beside it or where NAME's directory is.

    Raises UserError for a file that is none such.
    """
    document = _yaml(labels)
    for name, label in document.items():
        if not isinstance(label, Mapping) or "kind" not in label:
            raise UserError(f"{labels}: {name} has no `kind`")
        kind = label["kind"]
        files = tuple(_found(labels.parent, str(name), str(file)) for file in label.get("files", (f"{Path(name).name}.log",)))
        yield Case(name=str(name), files=files, kind=None if kind is None else str(kind))


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as labels: {str(error).splitlines()[0]}") from None
    if not isinstance(document, Mapping):
        raise UserError(f"{path} holds no labels: it maps names of cases to `kind` and `files`")
    return document


def _found(base: Path, case: str, file: str) -> Path:
    places = [base / file, base / Path(case).parent / file, base / "corpus" / Path(case).parent / file]
    path = next((place for place in places if place.is_file()), None)
    if not path:
        raise UserError(f"{case}: there is no {file} beside the labels")
    return path


def read_rules(path: Path | None) -> tuple[Rule, ...]:
    """The rules of an operator's file; none if there is no such file. Raises UserError naming the line that is broken."""
    if path is None or not path.exists():
        return ()
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return tuple(_rule(path, number, row) for number, row in enumerate(rows, 1) if row.strip())


def _rule(path: Path, number: int, row: str) -> Rule:
    try:
        told = json.loads(row)
        return taught(ErrorKind(told["kind"]), str(told["pattern"]), str(told["example"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}:{number} is no rule: {error}") from None


def add_rule(path: Path, rule: Rule) -> None:
    """Put a rule at the end of the file, whole or not at all; one that is there already stays alone."""
    rules = read_rules(path)
    if rule in rules:
        return
    rows = [json.dumps({"kind": it.kind, "pattern": it.pattern, "example": it.example}) for it in (*rules, rule)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text("\n".join(rows) + "\n", encoding="utf-8")
    new.replace(path)
