"""The cluster that commands speak to: the one that the environment names, else the one that `unicron up` started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_lib.controller.client import ControllerClient
    from unicron_lib.journal import Journal

NAMED_BY = ("UNICRON_STORE_URL", "UNICRON_CONTROLLER_URL", "UNICRON_TOKEN_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a cluster is. `env` is what a process that deploys to its Prefect server needs."""

    store_url: str
    controller_url: str
    token: str = field(repr=False)
    ui_url: str
    env: Mapping[str, str] = field(repr=False)

    def journal(self) -> "Journal":
        """Its journal."""
        from unicron_lib.adapters.stores import open_store
        from unicron_lib.journal import Journal

        return Journal(open_store(self.store_url))

    def client(self) -> "ControllerClient":
        """A client of its controller, to be used with `async with`."""
        from unicron_lib.controller.client import ControllerClient

        return ControllerClient(self.controller_url, self.token)


def find_target(env: Mapping[str, str] = os.environ) -> Target:
    """The cluster to speak to. Raises UserError if there is none, or if the environment names only a part of one."""
    from unicron_lib.agent.access import read_token
    from unicron_lib.config import Settings

    if any(env.get(name) for name in NAMED_BY):
        settings = Settings.from_env(env)
        ui_url = env.get("PREFECT_API_URL", "").rstrip("/").removesuffix("/api")
        return Target(
            store_url=settings.store_url,
            controller_url=settings.controller_url,
            token=settings.token,
            ui_url=ui_url,
            env=env,
        )
    from unicron_lib.local.site import load_site

    site = load_site()
    return Target(
        store_url=site.store_url,
        controller_url=site.controller_url,
        token=read_token(site.token_file),
        ui_url=site.ui_url,
        env=site.environment(),
    )
