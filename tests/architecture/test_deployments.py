"""Every deployment YAML fits its flow: `prefect deploy` itself checks neither the entrypoint nor the parameters."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOB_FILES = sorted([*(ROOT / "infra/jobs").glob("*.yaml"), *(ROOT / "examples").glob("*/*.yaml")])


def deployments(path: Path) -> list[dict[str, Any]]:
    found = yaml.safe_load(path.read_text())["deployments"]
    assert isinstance(found, list)
    return found


def flow_of(deployment: dict[str, Any]) -> Any:
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(import_module(module), name)


ALL = [
    pytest.param(deployment, id=f"{path.name}:{deployment['name']}")
    for path in [*JOB_FILES, ROOT / "prefect.yaml"]
    for deployment in deployments(path)
]


@pytest.mark.parametrize("deployment", ALL)
def test_entrypoint_is_a_flow_in_an_installed_module(deployment: dict[str, Any]) -> None:
    from prefect import Flow

    assert ":" not in deployment["entrypoint"]
    assert isinstance(flow_of(deployment), Flow)


@pytest.mark.parametrize("deployment", ALL)
def test_a_deployment_is_findable_and_pulls_no_code(deployment: dict[str, Any]) -> None:
    assert deployment["pull"] == []
    assert deployment["work_pool"] == {"name": "unicron"}
    assert "unicron" in deployment["tags"]
    assert deployment["description"]


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_a_job_file_holds_one_valid_job_of_its_name(path: Path) -> None:
    (deployment,) = deployments(path)
    job = flow_of(deployment).validate_parameters(deployment["parameters"])["job"]
    assert path.stem == deployment["name"] == job.job


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_a_prefect_server_accepts_the_parameters(path: Path) -> None:
    """It is stricter than the flow: YAML reads 1e9 as text, which pydantic takes for a number and the server does not."""
    from prefect.utilities.schema_tools.validation import validate

    (deployment,) = deployments(path)
    schema = flow_of(deployment).parameters.model_dump()
    validate(json.loads(json.dumps(deployment["parameters"])), schema, raise_on_error=True)


@pytest.mark.parametrize("wrong", [{"weigth": 1.0}, {"weight": 0}, {"min_gpus": 9}, {"throughput_flops": {"two": 1.0}}])
def test_a_mistake_in_a_job_is_refused(wrong: dict[str, Any]) -> None:
    from prefect.exceptions import ParameterTypeError

    (deployment,) = deployments(ROOT / "infra/jobs/gpt-a.yaml")
    job = deployment["parameters"]["job"] | wrong
    with pytest.raises(ParameterTypeError):
        flow_of(deployment).validate_parameters({"job": job})


@pytest.mark.parametrize("deployment", deployments(ROOT / "prefect.yaml"), ids=lambda deployment: deployment["name"])
def test_the_control_plane_flows_take_an_incident_or_nodes(deployment: dict[str, Any]) -> None:
    given = {"nodes": ["node-1"]} if deployment["name"] == "check-nodes" else {"incident": "incident-1"}
    assert flow_of(deployment).validate_parameters(given).items() >= given.items()
