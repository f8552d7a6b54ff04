"""The README cannot rot: what it lists exists, and what exists is listed."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from unicron_lib.config import Settings
from unicron_lib.domain.jobs import JobSpec

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NOT_FROM_A_DEFAULT = {"none": None, "measured": {}, "built in": {}}


def rows(first: str) -> dict[str, str]:
    """The rows of the table whose heading starts with `first`: what the first cell names, and the second cell."""
    table = README.split(f"| {first}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return {name.strip("`"): second for name, second, *_ in cells}


def default_of(field: dataclasses.Field[Any]) -> Any:
    if isinstance(field.default, frozenset):
        return ",".join(sorted(field.default))  # as the environment says it
    if field.default is not dataclasses.MISSING:
        return [] if field.default == () else field.default  # as YAML says it
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else "required"


def documented(cell: str) -> Any:
    return NOT_FROM_A_DEFAULT.get(cell, yaml.safe_load(cell.strip("`")))


def test_every_key_of_a_job_is_documented_with_its_default() -> None:
    told = {key: documented(cell) for key, cell in rows("key of `job`").items()}
    assert told == {field.name: default_of(field) for field in dataclasses.fields(JobSpec)}


def test_every_setting_is_documented_with_its_default() -> None:
    told = {key: documented(cell) for key, cell in rows("variable").items()}
    fields = {f"UNICRON_{field.name.upper()}": default_of(field) for field in dataclasses.fields(Settings)}
    fields["UNICRON_TOKEN_FILE"] = fields.pop("UNICRON_TOKEN")
    assert told == fields


def test_the_example_job_is_valid() -> None:
    from pydantic import TypeAdapter

    example = README.split("```yaml\n", 1)[1].split("```", 1)[0]
    (deployment,) = yaml.safe_load(example)["deployments"]
    job = TypeAdapter(JobSpec).validate_python(deployment["parameters"]["job"])
    assert job.job == deployment["name"]


def test_every_command_is_documented_and_exists() -> None:
    told = {name.split()[1] for name in rows("command")}
    code = "import sys; sys.argv = ['unicron', '--help']; from unicron_lib.cli import main; main()"
    env = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert told == set(re.findall(r"^[│ ]*([a-z]+) {2,}[^│ ]", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_is_named_exists(document: str) -> None:
    named = set(re.findall(r"(?:^|`)(?:\w+=\S+ )?make ([a-z]+)", (ROOT / document).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "unicron_lib/DECISIONS.md"])
def test_every_file_that_is_linked_exists(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert all((path.parent / link).exists() for link in links)


def test_every_module_that_is_started_by_hand_exists() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
