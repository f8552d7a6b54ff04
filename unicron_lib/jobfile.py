"""A job's file: a Prefect deployment YAML whose parameter `job` is a JobSpec. Checked before anything is started."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError

TRAIN = "flows.training.train"
EXAMPLE = "see infra/jobs/gpt-a.yaml for a job's file"
REQUIRED = ("name", "entrypoint")
SHAPES: Mapping[str, tuple[type, str]] = {
    "name": (str, "text"),
    "entrypoint": (str, "text"),
    "description": (str, "text"),
    "work_pool": (dict, "a mapping such as {name: unicron}"),
    "parameters": (dict, "a mapping"),
    "pull": (list, "a list, [] to pull nothing"),
    "tags": (list, "a list"),
    "triggers": (list, "a list"),
}
FORBIDDEN_IN_NAMES = frozenset("/%&<>")  # Prefect's rule: names are parts of its addresses
job_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
_text_keys = frozenset(field.name for field in fields(JobSpec) if field.type is str) | {"env"}


def read_jobs(path: Path) -> tuple[JobSpec, ...]:
    """The jobs of a deployment YAML. Raises UserError, one sentence with the file, the key and what to do."""
    entries = read_deployments(path)
    for entry in entries:
        if entry["entrypoint"] != TRAIN:
            raise UserError(f"{path}: the entrypoint is {entry['entrypoint']!r}: a job's is {TRAIN}")
    return tuple(_spec(path, entry) for entry in entries)


def read_deployments(*paths: Path) -> list[dict[str, Any]]:
    """The entries of `deployments` in Prefect YAMLs, each with a name and an entrypoint, jobs with a valid JobSpec.

    Raises UserError for the first mistake, also for a deployment or a job that is described twice.
    """
    found = [(path, entry) for path in paths for entry in _entries(path)]
    for path, entry in found:
        _check_entry(path, entry)
        _resolve_directory(path, entry)
    _refuse_doubles("deployment", ((path, entry["name"]) for path, entry in found))
    jobs = [(path, _spec(path, entry).job) for path, entry in found if entry["entrypoint"] == TRAIN]
    _refuse_doubles("job", jobs)
    return [entry for _, entry in found]


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give the path of a deployment YAML") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text file in UTF-8: give the path of a deployment YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    entries = loaded.get("deployments") if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: has no list `deployments` of mappings: {EXAMPLE}")
    return entries


def _check_entry(path: Path, entry: Mapping[str, Any]) -> None:
    where = f"{path}: deployment {entry.get('name')!r}"
    for key in REQUIRED:
        if not entry.get(key):
            raise UserError(f"{where}: the key {key!r} is missing: {EXAMPLE}")
    for key, (shape, told) in SHAPES.items():
        value = entry.get(key)
        if value is not None and not isinstance(value, shape):
            raise UserError(f"{where}: {key} must be {told}, found {value!r}")
    bad = FORBIDDEN_IN_NAMES.intersection(entry["name"])
    if bad:
        raise UserError(f"{where}: a deployment's name must not contain {' '.join(sorted(bad))}: choose another one")
    pool = (entry.get("work_pool") or {}).get("name", "")
    if not isinstance(pool, str):
        raise UserError(f"{where}: work_pool.name must be text, found {pool!r}")


def _resolve_directory(path: Path, entry: dict[str, Any]) -> None:
    """A relative `working_dir` is relative to the job's file; from here on everybody sees the absolute path."""
    parameters = entry.get("parameters") or {}
    job = parameters.get("job")
    directory = job.get("working_dir") if isinstance(job, dict) else None
    if isinstance(job, dict) and isinstance(directory, str) and directory:
        entry["parameters"] = {**parameters, "job": {**job, "working_dir": str((path.parent / directory).resolve())}}


def _refuse_doubles(what: str, named: Iterable[tuple[Path, str]]) -> None:
    seen: dict[str, Path] = {}
    for path, name in named:
        if name in seen:
            also = "twice" if seen[name] == path else f"also in {seen[name]}"
            raise UserError(f"{path}: the {what} {name!r} is described {also}: keep one of them or rename it")
        seen[name] = path


def _spec(path: Path, entry: Mapping[str, Any]) -> JobSpec:
    parameters = entry.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("job"), dict):
        raise UserError(f"{path}: has no `parameters: {{job: ...}}`: {EXAMPLE}")
    return parse_spec(parameters["job"], where=str(path))


def parse_spec(raw: Mapping[str, Any], *, where: str) -> JobSpec:
    """The JobSpec that `raw` describes. Raises UserError naming the first key that is wrong."""
    _refuse_no_command(raw, where)
    try:
        spec = job_spec.validate_python(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {_sentence(error)}") from error
    _refuse_numbers_as_text(raw, where)
    return spec


def _refuse_no_command(raw: Mapping[str, Any], where: str) -> None:
    """Without words, or as one text, a command would be taken for none, or for letters."""
    command = raw.get("command", ("",))
    example = "write a list of texts, such as [python, train.py, --epochs, '3']"
    if not isinstance(command, list | tuple):
        raise UserError(f"{where}: command is {command!r}: {example}")
    if not command:
        raise UserError(f"{where}: command is empty: {example}, or leave the key out")
    for word in command:
        if not isinstance(word, str):
            raise UserError(f"{where}: command has {word!r}, which is no text: put it into quotes")


def _refuse_numbers_as_text(raw: Mapping[str, Any], where: str) -> None:
    """Pydantic takes the text that YAML makes of 1e9 for a number, a Prefect server later does not."""
    for key, value in raw.items():
        for part in _parts(value):
            if isinstance(part, str) and key not in _text_keys:
                raise UserError(f"{where}: {key}: {part!r} is text: write a number, a large one with dot and sign, 1.0e+9")


def _parts(value: object) -> Iterator[object]:
    """A value itself, or those of mappings, also in a list; other lists are of texts."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _parts(part)
    elif isinstance(value, list):
        for entry in value:
            yield from _parts(entry) if isinstance(entry, dict) else ()
    else:
        yield value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key {key!r} under `job`: README lists the keys, 'How to write a job'"
    if first["type"] == "missing":
        return f"the key {key!r} is missing under `job`"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]}, found {first['input']!r}" if key else message
