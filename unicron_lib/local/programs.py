"""The processes of a local cluster and how each is started."""

from unicron_lib.agent.gpus import num_devices
from unicron_lib.local.processes import Program
from unicron_lib.local.site import Site


def store_program(site: Site) -> Program:
    """The S3 server."""
    return _program(site, "s3", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(site.s3_port))


def control_programs(site: Site) -> tuple[Program, ...]:
    """Prefect's server and worker, the controller, the recovery service."""
    prefect = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "warning")
    return (
        _program(site, "prefect-server", *prefect, "--host", "127.0.0.1", "--port", str(site.prefect_port)),
        _program(
            site,
            "controller",
            *("-m", "unicron_lib.controller", "--host", "127.0.0.1", "--port", str(site.controller_port)),
            *("--token-file", str(site.token_file), "--store-url", site.store_url),
            *("--scale-up-snooze-s", str(site.scale_up_snooze_s)),
        ),
        _program(site, "recovery", "-m", "flows.service"),
        _program(site, "worker", "-m", "prefect", "worker", "start", "--pool", "unicron", "--type", "process"),
    )


def agent_program(site: Site, node: str) -> Program:
    """The agent of `node`."""
    return _program(
        site,
        node,
        *("-m", "unicron_lib.agent", "--controller", f"ws://127.0.0.1:{site.controller_port}/v1/agents"),
        *("--token-file", str(site.token_file), "--node", node, "--address", site.address(node)),
        *("--num-gpus", str(site.gpus_per_node), "--run-dir", str(site.run_dir), "--interface", "lo"),
        *(("--imagined-gpus",) if site.gpus_per_node > num_devices() else ()),  # every node counts the same few
        *("--kernel-log", "none", "--spot-notices", "off"),  # what happens to this machine would happen to every node
    )


def _program(site: Site, name: str, *arguments: str) -> Program:
    return Program(name=name, arguments=arguments, log=site.logs / f"{name}.log")
