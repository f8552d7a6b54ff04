"""A local cluster's place: its directories, ports, secret and environment, and the file by which commands find it."""

import json
import os
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from unicron_lib.errors import UserError
from unicron_lib.local.processes import MARK, free_port, port_is_free

BUCKET = "unicron"
REPOSITORY = Path(__file__).parents[2]
PREFECT_FILE = REPOSITORY / "prefect.yaml"
JOB_FILES = REPOSITORY / "infra" / "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Everything that the processes of one local cluster share. `s3_port` 0 means the `file://` store.

    `scale_up_snooze_s` is the controller's; 0, for here nodes come and go because somebody plays with them.
    """

    cluster_id: str
    home: str
    num_nodes: int
    gpus_per_node: int
    prefect_port: int
    controller_port: int
    s3_port: int = 0
    supervisor_pid: int = 0
    scale_up_snooze_s: float = 0.0

    @property
    def path(self) -> Path:
        """The cluster's directory."""
        return Path(self.home)

    @property
    def token_file(self) -> Path:
        """The secret that agents, flows and commands show to the controller."""
        return self.path / "token"

    @property
    def logs(self) -> Path:
        """A log a process."""
        return self.path / "logs"

    @property
    def run_dir(self) -> Path:
        """Where agents keep rank logs and ledgers."""
        return self.path / "run"

    @property
    def store_url(self) -> str:
        """The object store."""
        return f"s3://{BUCKET}/{self.cluster_id}" if self.s3_port else (self.path / "store").resolve().as_uri()

    @property
    def controller_url(self) -> str:
        """The controller's HTTP address."""
        return f"http://127.0.0.1:{self.controller_port}"

    @property
    def ui_url(self) -> str:
        """The Prefect UI."""
        return f"http://127.0.0.1:{self.prefect_port}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(f"node-{number}" for number in range(1, self.num_nodes + 1))

    def address(self, node: str) -> str:
        """A loopback address of the node's own."""
        return f"127.0.1.{self.nodes.index(node) + 1}"

    def environment(self) -> dict[str, str]:
        """What every process of the cluster finds in its environment."""
        env = {
            **os.environ,
            MARK: self.cluster_id,
            "UNICRON_STORE_URL": self.store_url,
            "UNICRON_CONTROLLER_URL": self.controller_url,
            "UNICRON_TOKEN_FILE": str(self.token_file),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **_prefect(self),
        }
        return {**env, **_s3(self.s3_port)} if self.s3_port else env


def _prefect(site: Site) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(site.path / "prefect"),
        "PREFECT_API_URL": f"{site.ui_url}/api",
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "0.5",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "unicron",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK": "unicron-store/cluster",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    }


def _s3(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "unicron",
        "AWS_SECRET_ACCESS_KEY": "unicron-local",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def create_site(
    home: Path, *, num_nodes: int, gpus_per_node: int, with_s3: bool, prefect_port: int = 0, controller_port: int = 0
) -> Site:
    """Make the directories and the secret; ports that are 0 are chosen. Raises UserError for a port in use."""
    for name, port in (("--prefect-port", prefect_port), ("--controller-port", controller_port)):
        if port and not port_is_free(port):
            raise UserError(f"port {port} is in use: stop what listens there or choose another one with {name}")
    site = Site(
        cluster_id=f"unicron-{secrets.token_hex(4)}",
        home=str(home.resolve()),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        prefect_port=prefect_port or free_port(),
        controller_port=controller_port or free_port(),
        s3_port=free_port() if with_s3 else 0,
    )
    for directory in (site.path, site.logs, site.run_dir, site.path / "prefect"):
        directory.mkdir(parents=True, exist_ok=True)
    if not site.token_file.exists():
        site.token_file.touch(mode=0o600)
        site.token_file.write_text(secrets.token_urlsafe(32))
    return site


def default_home() -> Path:
    """`$UNICRON_HOME`, else `~/.local/state/unicron`."""
    return Path(os.environ.get("UNICRON_HOME") or Path.home() / ".local" / "state" / "unicron")


def save_site(site: Site) -> None:
    """Write the file by which commands find the cluster."""
    target = site.path / "cluster.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(site)))
    partial.replace(target)


def load_site(home: Path | None = None) -> Site:
    """The cluster that `unicron up` left running. Raises UserError if there is none."""
    path = (home or default_home()) / "cluster.json"
    try:
        site = Site(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError("no local cluster is known here: start one with `unicron up`") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it and run `unicron up`") from error
    return site
