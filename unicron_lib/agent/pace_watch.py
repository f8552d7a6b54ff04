"""Looks at the beat pages of all ranks of the node, ten times a second, and tells which of them stand still.

Of a rank that is silent for long it also looks whether it does anything. One that may wait for others, in a collective or
anywhere, does nothing if nobody of its job does; where others are on other nodes, nobody here can know.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from unicron_lib.agent.beats import BeatReader, beat_path
from unicron_lib.agent.glimpses import glimpse
from unicron_lib.agent.messages import NodeNotice, RankResumed, RankStalled
from unicron_lib.agent.ranks import Phase, Rank, RankKey, Ranks
from unicron_lib.detection.lateness import Lateness
from unicron_lib.detection.pace import Beat, Pace, Resumed, Stalled
from unicron_lib.detection.sections import PACED, Section
from unicron_lib.detection.stillness import Glimpse, Stillness

log = logging.getLogger(__name__)
LOOK_S = 0.1
BLIND_S = 0.6
"""A look that comes so much later than the last one has missed something: this process itself was stopped, or starved."""
MEMORY = Path("/dev/shm")  # noqa: S108 - private directories are made in it
PREFIX = "unicron-beats-"
NEW_S = 60.0


class _Watched:
    """A rank with its page."""

    def __init__(self, rank: Rank, path: Path) -> None:
        self.rank = rank
        self.pace = Pace(rank.limits)
        self._path = path
        self._clock = float("-inf")
        self._reader: BeatReader | None = None
        self._stillness: Stillness | None = None

    def read(self) -> Beat | None:
        if self._reader is None:
            try:
                self._reader = BeatReader(self._path)
            except FileNotFoundError:
                return None
        return self._reader.read()

    def restart_clock(self, at: float) -> None:
        """Silence counts from `at` on (monotonic), or later."""
        self._clock = max(self._clock, at)
        self.pace.restart_clock(self._clock)

    def excuse(self, seconds: float, beat: Beat, now: float) -> None:
        """Nobody has looked for so long: that much of its silence does not count."""
        self.restart_clock(min(now, max(self._clock, beat.at) + seconds))
        self._stillness = None if seconds else self._stillness

    def still_since(self, beat: Beat, now: float, see: Callable[[int], Glimpse | None]) -> float | None:
        """Since when its process is known to do nothing; it is looked at only while that matters."""
        if not self.pace.is_doubtful(beat, now):
            self._stillness = None
            return None
        if self._stillness is None:
            self._stillness = Stillness()
        self._stillness.look(see(self.rank.pid), now)
        return self._stillness.since

    def waits_for_others(self, beat: Beat) -> bool:
        """Whether it may do nothing because others have not come yet."""
        return self.rank.needs_peers or beat.section is Section.COLLECTIVE

    def forget(self) -> None:
        if self._reader:
            self._reader.close()
        self._path.unlink(missing_ok=True)


class PaceWatch:
    """Watches the ranks of `ranks`, whose pages are below `directory`; what it finds is told to `tell`.

    `hear` is called for each rank at each look; `see` looks at a process; `is_gpu_idle` tells whether a GPU is known to have
    done nothing since a moment (monotonic).
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        directory: Path,
        tell: Callable[[RankStalled | RankResumed | NodeNotice], None],
        hear: Callable[[Rank], None] = lambda _: None,
        see: Callable[[int], Glimpse | None] = glimpse,
        is_gpu_idle: Callable[[int, float], bool] = lambda *_: True,
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._tell = tell
        self._hear = hear
        self._see = see
        self._is_gpu_idle = is_gpu_idle
        self._watched: dict[RankKey, _Watched] = {}
        self._lateness = Lateness(usual_s=LOOK_S, late_s=BLIND_S)
        self._is_blind = False

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                self.look(now=time.monotonic())
            except Exception:  # a watch that ends in silence would be worse
                log.exception("this look at the ranks failed, another one follows")
            await asyncio.sleep(LOOK_S)

    def look(self, *, now: float) -> None:
        """One look at all ranks, at `now` (monotonic)."""
        self._renew()
        missed_s = self._lateness.look(now) or 0.0
        self._tell_blindness(now)
        beats = {key: beat for key, watched in self._watched.items() if (beat := watched.read())}
        busy = {key[:2] for key, beat in beats.items() if beat.section not in PACED}
        for key, beat in beats.items():
            watched = self._watched[key]
            watched.excuse(missed_s, beat, now)
            if beat.section is Section.COLLECTIVE and key[:2] in busy:
                watched.restart_clock(now)  # it waits for a rank that may take its time
        still_s = self._still_s(beats, now)
        for key, beat in beats.items():
            watched = self._watched[key]
            if finding := watched.pace.look(beat, now, still_s=still_s.get(key, 0.0)):
                self._tell(_told(watched.rank, finding))

    def _still_s(self, beats: Mapping[RankKey, Beat], now: float) -> dict[RankKey, float]:
        """For how long ranks, and all whom they may wait for, are known to have done nothing."""
        since = {}
        for key, beat in beats.items():
            watched = self._watched[key]
            at = watched.still_since(beat, now, self._see)
            if at is not None and self._is_gpu_idle(watched.rank.gpu, at):
                since[key] = at
        quiet = Counter(key[:2] for key in since)
        return {
            key: now - at
            for key, at in since.items()
            if not self._watched[key].waits_for_others(beats[key]) or quiet[key[:2]] == self._watched[key].rank.world_size
        }

    def _tell_blindness(self, now: float) -> None:
        """Tell when this watch begins to be held up again and again, and when that is over."""
        is_blind = self._lateness.is_chronic(now)
        if is_blind is self._is_blind:
            return
        self._is_blind = is_blind
        text = "the watch over the ranks is held up again and again: what stands still may be told late, or too early"
        if not is_blind:
            text = "the watch over the ranks looks in time again"
        log.warning("%s", text)
        self._tell(NodeNotice(code="monitor_blind", text=text, active=is_blind))

    def _renew(self) -> None:
        living = {rank.key: rank for rank in self._ranks.alive if rank.phase is Phase.RUNNING and not rank.asked_to_stop}
        for key in [key for key in self._watched if key not in living]:
            self._watched.pop(key).forget()
        for key, rank in living.items():
            self._hear(rank)
            if key not in self._watched:
                self._watched[key] = _Watched(rank, beat_path(self._directory, *key))


def _told(rank: Rank, finding: Stalled | Resumed) -> RankStalled | RankResumed:
    job, generation, number = rank.key
    if isinstance(finding, Resumed):
        log.info("rank %s goes on after %.1f s", rank.key, finding.silent_s)
        return RankResumed(job=job, generation=generation, rank=number, iteration=finding.iteration, silent_s=finding.silent_s)
    log.warning("rank %s is silent in section %s for %.1f s", rank.key, finding.section, finding.silent_s)
    return RankStalled(
        job=job,
        generation=generation,
        rank=number,
        iteration=finding.iteration,
        section=finding.section.value,
        silent_s=finding.silent_s,
        limit_s=finding.limit_s,
        usual_s=finding.usual_s,
        wait_s=max(0.0, rank.limits.patience_s - finding.silent_s),
        still_s=finding.still_s,
    )


@contextmanager
def beat_directory(directory: Path) -> Iterator[None]:
    """Make `directory`/beats, in memory: on a disk, a rank could wait for the disk whenever it gives a sign.

    What an agent that was killed has left in memory is removed by the next one.
    """
    link = directory / "beats"
    if not os.access(MEMORY, os.W_OK):
        link.mkdir(exist_ok=True)
        yield
        return
    _sweep()
    link.unlink(missing_ok=True)
    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
    lock = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link.symlink_to(place)
        yield
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    """Remove this user's directories that no living agent holds the lock of; a new one may not be locked yet."""
    for place in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - place.stat().st_mtime < NEW_S:
                continue
            lock = os.open(place, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
