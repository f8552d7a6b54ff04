"""Register deployment YAMLs with a Prefect server and start their runs: what `prefect deploy --all` does, in one process.

Unlike it, all files, parameters and triggers are validated before anything is registered.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events import DeploymentTriggerTypes
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from pydantic import TypeAdapter

from tasks.results import BLOCK_NAME, UnicronStore
from unicron_lib.adapters.stores import open_store
from unicron_lib.errors import UnicronError, UserError
from unicron_lib.jobfile import read_deployments

POOL = "unicron"
_trigger: TypeAdapter[DeploymentTriggerTypes] = TypeAdapter(DeploymentTriggerTypes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """An entry of a YAML that can be registered: its flow is loaded, parameters and triggers fit."""

    entry: dict[str, Any]
    flow: Flow[..., Any]
    triggers: tuple[DeploymentTriggerTypes, ...]

    @property
    def full_name(self) -> str:
        """`flow/name`."""
        return f"{self.flow.name}/{self.entry['name']}"


def load(*paths: Path) -> list[Deployment]:
    """Every deployment of the YAMLs. Raises UserError for the first mistake in any of them."""
    return [_load(entry) for entry in read_deployments(*paths)]


def _load(entry: dict[str, Any]) -> Deployment:
    name, entrypoint = entry["name"], entry["entrypoint"]
    try:
        flow = import_object(entrypoint)
    except Exception as error:  # an import runs foreign code, which raises what it likes
        raise UserError(f"deployment {name!r}: the entrypoint {entrypoint!r} cannot be loaded: {_words(error)}") from error
    if not isinstance(flow, Flow):
        raise UserError(f"deployment {name!r}: {entrypoint!r} is not a flow: give package.module.flow")
    try:
        flow.validate_parameters(entry.get("parameters") or {})
    except (PrefectException, TypeError, ValueError) as error:
        raise UserError(f"deployment {name!r}: the parameters do not fit {entrypoint}: {_words(error)}") from error
    return Deployment(entry=entry, flow=flow, triggers=tuple(_triggers(entry)))


def _triggers(entry: dict[str, Any]) -> Iterator[DeploymentTriggerTypes]:
    for number, spec in enumerate(entry.get("triggers") or [], start=1):
        try:
            yield _trigger.validate_python({"name": f"{entry['name']}-{number}", **spec})
        except (TypeError, ValueError) as error:
            raise UserError(f"deployment {entry['name']!r}: trigger {number} is broken: {_words(error)}") from error


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def prepare(store_url: str) -> None:
    """Make the work pool and the result storage block exist."""
    async with get_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    await UnicronStore(url=store_url).asave(BLOCK_NAME, overwrite=True)


async def register(deployments: Iterable[Deployment]) -> list[str]:
    """Register deployments with their triggers; their full names `flow/name`."""
    async with get_client() as client:
        return [await _register_one(client, deployment) for deployment in deployments]


async def _register_one(client: PrefectClient, wanted: Deployment) -> str:
    entry, flow = wanted.entry, wanted.flow
    deployment = await client.create_deployment(
        flow_id=await client.create_flow(flow),
        name=entry["name"],
        entrypoint=entry["entrypoint"],
        parameters=entry.get("parameters") or {},
        description=entry.get("description"),
        tags=entry.get("tags") or [],
        work_pool_name=(entry.get("work_pool") or {}).get("name", POOL),
        pull_steps=entry.get("pull") or [],
        parameter_openapi_schema=parameter_schema(flow).model_dump(mode="json"),
        enforce_parameter_schema=True,
    )
    await client.delete_resource_owned_automations(f"prefect.deployment.{deployment}")
    for trigger in wanted.triggers:
        trigger.set_deployment_id(deployment)
        await client.create_automation(trigger.as_automation())
    return wanted.full_name


async def start(full_name: str) -> dict[str, str]:
    """Create a run of a deployment; its id, name and page."""
    async with get_client() as client:
        deployment = await client.read_deployment_by_name(full_name)
        run = await client.create_flow_run_from_deployment(deployment.id)
    ui = get_current_settings().api.url or ""
    return {"deployment": full_name, "flow_run": str(run.id), "url": f"{ui.removesuffix('/api')}/runs/flow-run/{run.id}"}


async def _main(arguments: argparse.Namespace) -> list[Any]:
    deployments = load(*arguments.files)
    if arguments.store_url:
        open_store(arguments.store_url)  # raises for a URL that is none, before a server keeps it
    url = get_current_settings().api.url
    if not url:
        raise UserError("no Prefect server is named: set PREFECT_API_URL, such as http://control:4200/api")
    try:
        if arguments.store_url:
            await prepare(arguments.store_url)
        names = await register(deployments)
        return [await start(name) for name in names] if arguments.run else list(names)
    except (httpx.HTTPStatusError, PrefectException, ValueError) as error:  # a ValueError: no answer of a Prefect server
        told = f"registering at {url} failed ({_words(error)})"
        raise UnicronError(f"{told}: PREFECT_API_URL must be a Prefect server's address, ending in /api") from error
    except httpx.HTTPError as error:
        told = f"the Prefect server at {url} does not answer ({_words(error)})"
        raise UnicronError(f"{told}: start it, or set PREFECT_API_URL to where it is") from error


def main() -> int:
    """`python -m flows.deployments [--store-url URL] [--run] FILE...`: JSON on stdout.

    Nothing is registered unless all files are right. Exit code 2 for a broken file, 1 for a server that does not answer.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--store-url", default="", help="also make the work pool and the result storage in this store exist")
    parser.add_argument("--run", action="store_true", help="start a run of each deployment")
    try:
        result = asyncio.run(_main(parser.parse_args()))
    except UnicronError as error:
        sys.stderr.write(f"unicron: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
