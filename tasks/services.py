"""What tasks work with, picked by name in the process that runs them: services cannot travel as parameters."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unicron_lib.adapters.stores import open_store
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.config import Settings
from unicron_lib.controller.client import ControllerClient
from unicron_lib.controller.views import JobProgress
from unicron_lib.journal import Journal
from unicron_lib.planning.pool_rules import ALIKE, PoolRules, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The control plane as one process sees it."""

    settings: Settings
    store: ObjectStore
    journal: Journal
    controller: ControllerClient
    pool_rules: PoolRules = ALIKE

    async def live(self) -> dict[str, JobProgress]:
        """The newest progress of each job. Raises ControllerError."""
        return {live.job: live for live in await self.controller.progress()}


@cache
def services() -> Services:
    """The services that the environment names; made once per process. Raises UserError."""
    settings = Settings.from_env()
    store = open_store(settings.store_url)
    return Services(
        settings=settings,
        store=store,
        journal=Journal(store),
        controller=ControllerClient(settings.controller_url, settings.token),
        pool_rules=load(Path(settings.pools_file)) if settings.pools_file else ALIKE,
    )
