"""Reading the YAML or JSON of a scenario: one sentence for whatever is wrong, and no key that silently wins over its double."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from unicron_lib.errors import UserError


def load(path: Path) -> object:
    """What a YAML or JSON file holds. Raises UserError with one sentence if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return _document(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise UserError(f"{path} is nested too deeply for a scenario") from None


def _document(text: str) -> object:
    # not all JSON is YAML for PyYAML: tabs are not
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 it is a SafeLoader


def _without_doubles(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if twice:
        raise UserError(f"the key {twice[0]} comes twice in one mapping, remove one of the two")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        _without_doubles([(str(self.construct_object(key, deep=True)), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def sentence(error: ValidationError, document: Mapping[Any, Any]) -> str:
    """The first finding of pydantic as `job gpt-a: weight is -1: input should be greater than 0`."""
    found = error.errors()[0]
    where = [str(part) for part in found["loc"] if not str(part).startswith("[")]
    subject = ""
    if len(where) > 1 and where[0] == "jobs":
        subject, where = f"job {_name(document, int(where[1]))}: ", where[2:]
    key = " of ".join(reversed(where)) or "the job"
    if found["type"] == "missing":
        return f"{subject}the key {key} is missing"
    if found["type"] == "extra_forbidden":
        return f"{subject}the key {key} is unknown, remove it or correct its spelling"
    value = found["input"]
    shown = "" if isinstance(value, (dict, list)) else f" is {value!r}"
    return f"{subject}{key}{shown}: {found['msg'][0].lower()}{found['msg'][1:]}"


def _name(document: Mapping[Any, Any], index: int) -> str:
    job = document["jobs"][index]
    name = job.get("job") if isinstance(job, Mapping) else None
    return str(name) if name else f"number {index + 1}"
