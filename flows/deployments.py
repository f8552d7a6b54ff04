"""Register deployment YAMLs with a Prefect server and start their runs: what `prefect deploy --all` does, in one process.

Unlike it, parameters are validated against the flow before anything is registered.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from prefect import Flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events import DeploymentTriggerTypes
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from pydantic import TypeAdapter

from tasks.results import BLOCK_NAME, UnicronStore
from unicron_lib.errors import UserError
from unicron_lib.jobfile import read_deployments

POOL = "unicron"
_trigger: TypeAdapter[DeploymentTriggerTypes] = TypeAdapter(DeploymentTriggerTypes)


async def prepare(store_url: str) -> None:
    """Make the work pool and the result storage block exist."""
    async with get_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    await UnicronStore(url=store_url).asave(BLOCK_NAME, overwrite=True)


async def register(path: Path) -> list[str]:
    """Register every deployment of a YAML with its triggers; their full names `flow/name`. Raises UserError."""
    entries = read_deployments(path)
    flows = [_load(path, entry) for entry in entries]
    async with get_client() as client:
        return [await _register_one(client, entry, flow) for entry, flow in zip(entries, flows, strict=True)]


def _load(path: Path, entry: dict[str, Any]) -> Flow[..., Any]:
    try:
        flow = import_object(str(entry.get("entrypoint")))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: the entrypoint {entry.get('entrypoint')!r} cannot be loaded: {error}") from error
    if not isinstance(flow, Flow):
        raise UserError(f"{path}: {entry.get('entrypoint')!r} is not a flow")
    flow.validate_parameters(entry.get("parameters") or {})
    return flow


async def _register_one(client: PrefectClient, entry: dict[str, Any], flow: Flow[..., Any]) -> str:
    deployment = await client.create_deployment(
        flow_id=await client.create_flow(flow),
        name=entry["name"],
        entrypoint=entry["entrypoint"],
        parameters=entry.get("parameters") or {},
        description=entry.get("description"),
        tags=entry.get("tags") or [],
        work_pool_name=entry.get("work_pool", {}).get("name", POOL),
        pull_steps=entry.get("pull") or [],
        parameter_openapi_schema=parameter_schema(flow).model_dump(mode="json"),
        enforce_parameter_schema=True,
    )
    await client.delete_resource_owned_automations(f"prefect.deployment.{deployment}")
    for number, spec in enumerate(entry.get("triggers") or [], start=1):
        trigger = _trigger.validate_python({"name": f"{entry['name']}-{number}", **spec})
        trigger.set_deployment_id(deployment)
        await client.create_automation(trigger.as_automation())
    return f"{flow.name}/{entry['name']}"


async def start(full_name: str) -> dict[str, str]:
    """Create a run of a deployment; its id, name and page."""
    async with get_client() as client:
        deployment = await client.read_deployment_by_name(full_name)
        run = await client.create_flow_run_from_deployment(deployment.id)
    ui = get_current_settings().api.url or ""
    return {"deployment": full_name, "flow_run": str(run.id), "url": f"{ui.removesuffix('/api')}/runs/flow-run/{run.id}"}


async def _main(arguments: argparse.Namespace) -> list[Any]:
    if arguments.store_url:
        await prepare(arguments.store_url)
    names = [name for path in arguments.files for name in await register(path)]
    return [await start(name) for name in names] if arguments.run else names


def main() -> int:
    """`python -m flows.deployments [--store-url URL] [--run] FILE...`: JSON on stdout; exit code 2 for a broken file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--store-url", default="")
    parser.add_argument("--run", action="store_true")
    try:
        result = asyncio.run(_main(parser.parse_args()))
    except UserError as error:
        sys.stderr.write(f"unicron: {error}\n")
        return 2
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
