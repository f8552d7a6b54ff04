"""A job's file: a Prefect deployment YAML whose parameter `job` is a JobSpec. Checked before anything is started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError

TRAIN = "flows.training.train"
job_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


def read_jobs(path: Path) -> tuple[JobSpec, ...]:
    """The jobs of a deployment YAML. Raises UserError, one sentence with the file, the key and what to do."""
    return tuple(_spec(path, entry) for entry in read_deployments(path))


def read_deployments(path: Path) -> list[dict[str, Any]]:
    """The entries of `deployments` in a Prefect YAML. Raises UserError."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give the path of a deployment YAML") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    entries = loaded.get("deployments") if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: has no list `deployments`: see infra/jobs/gpt-a.yaml for a job's file")
    return entries


def _spec(path: Path, entry: Mapping[str, Any]) -> JobSpec:
    if entry.get("entrypoint") != TRAIN:
        raise UserError(f"{path}: the entrypoint is {entry.get('entrypoint')!r}: a job's is {TRAIN}")
    parameters = entry.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("job"), dict):
        raise UserError(f"{path}: has no `parameters: {{job: ...}}`: see infra/jobs/gpt-a.yaml")
    return parse_spec(parameters["job"], where=str(path))


def parse_spec(raw: Mapping[str, Any], *, where: str) -> JobSpec:
    """The JobSpec that `raw` describes. Raises UserError naming the first key that is wrong."""
    try:
        return job_spec.validate_python(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key {key!r} under `job`: README lists the keys, 'How to write a job'"
    if first["type"] == "missing":
        return f"the key {key!r} is missing under `job`"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]}, found {first['input']!r}" if key else message
