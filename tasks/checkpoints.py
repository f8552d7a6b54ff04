"""A job's checkpoints on the run's page, and a warning, then an alarm, when the newest becomes too old."""

import asyncio
import logging
import time
from datetime import UTC, datetime

from tasks.reporting import report_checkpoints
from tasks.services import services
from unicron_lib.checkpointing.freshness import Freshness, Level, judge
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.survey import Found, State, survey
from unicron_lib.controller.views import JobProgress
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.planning.cadence import pause_s

log = logging.getLogger("unicron.checkpoints")


class CheckpointWatch:
    """Looks at one job's checkpoints again and again; what has not changed is neither read nor told again."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._repository = CheckpointRepository(services().store, job.job)
        self._keys: list[str] = []
        self._found: list[Found] | None = None
        self._level = Level.FRESH

    async def look(self, live: JobProgress | None) -> Freshness | None:
        """Report what is new; how fresh the newest is, None while the job does not run. Raises StoreError."""
        try:
            is_news = await self._read()
        finally:  # a store that is away is why the newest grows old
            freshness = self._tell(self._judge(live, time.time()))
        if is_news:
            told = freshness.told if freshness else f"the checkpoints of {self._job.job}"
            await report_checkpoints(self._job.job, [_row(found) for found in self._found or ()], told)
        return freshness

    async def _read(self) -> bool:
        """Whether there is anything new."""
        keys = await asyncio.to_thread(self._repository.all_manifest_keys)
        if keys == self._keys and self._found is not None:
            return False
        self._found, self._keys = await asyncio.to_thread(survey, self._repository, self._job.job), keys
        return bool(keys)

    def _tell(self, freshness: Freshness | None) -> Freshness | None:
        if freshness and freshness.level != self._level:
            self._level = freshness.level
            tell = {Level.FRESH: log.info, Level.LATE: log.warning, Level.OVERDUE: log.error}[freshness.level]
            tell("%s", freshness.told)
        return freshness

    def _judge(self, live: JobProgress | None, now: float) -> Freshness | None:
        if live is None or self._found is None:
            return None
        newest = next((it.manifest for it in self._found if it.state is State.NEWEST and it.manifest), None)
        since = max(live.first_iteration_at, newest.committed_at if newest else 0.0)
        usual_s = self._usual_s(live, newest)
        return judge(self._job.job, age_s=max(0.0, now - since), usual_s=usual_s)

    def _usual_s(self, live: JobProgress, newest: Manifest | None) -> float:
        """What lies between two checkpoints."""
        blocking_s, upload_s = (newest.blocking_s, newest.upload_s) if newest else (0.0, 0.0)
        if self._job.save_interval:
            return self._job.save_interval * live.iteration_s + upload_s
        mtbf_s = services().mtbf_s(live.world_size)
        return pause_s(blocking_s=blocking_s, upload_s=upload_s, mtbf_s=mtbf_s) + live.iteration_s + upload_s


def _row(found: Found) -> dict[str, str]:
    manifest = found.manifest
    at = manifest.committed_at if manifest else 0.0
    return {
        "iteration": str(found.iteration),
        "generation": str(found.generation),
        "state": str(found.state),
        "saved (UTC)": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else "",
        "MB": f"{manifest.num_bytes / 1e6:.2f}" if manifest else "",
        "blocking s": f"{manifest.blocking_s:.3f}" if manifest else "",
        "upload s": f"{manifest.upload_s:.3f}" if manifest else "",
        "why": found.reason,
    }
