"""What tasks work with, picked by name in the process that runs them: services cannot travel as parameters."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unicron_lib.adapters.stores import open_store
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.config import Settings
from unicron_lib.controller.client import ControllerClient
from unicron_lib.controller.views import JobProgress
from unicron_lib.domain.check_policy import LAUNCH_CHECK_S
from unicron_lib.domain.judging import Policy
from unicron_lib.journal import Journal
from unicron_lib.planning.failure_rate import observed_mtbf_gpu_s
from unicron_lib.planning.pool_rules import ALIKE, PoolRules, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The control plane as one process sees it."""

    settings: Settings
    store: ObjectStore
    journal: Journal
    controller: ControllerClient
    pool_rules: PoolRules = ALIKE

    @property
    def policy(self) -> Policy:
        """What decisions wait for here."""
        return Policy(launch_check_s=LAUNCH_CHECK_S if "launch" in self.settings.check_nodes else 0.0)

    async def live(self) -> dict[str, JobProgress]:
        """The newest progress of each job. Raises ControllerError."""
        return {live.job: live for live in await self.controller.progress()}

    def mtbf_s(self, num_gpus: int) -> float:
        """The mean time between two failures that so many GPUs will have, by what the journal knows."""
        seen = observed_mtbf_gpu_s(self.journal.state, prior_mtbf_gpu_s=self.settings.mtbf_gpu_s)
        return seen / max(1, num_gpus)


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
