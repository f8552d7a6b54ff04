"""The memory of a watcher of GPUs: what they are compared with, which of them there were, what was told already. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from unicron_lib.detection.gpu import GpuFinding, GpuReading, finding, judge

RETELL_S = 600.0
"""How often it is told that a GPU is still broken: somebody may have released its node without having repaired it."""


class GpuWatch:
    """What each GPU is compared with, and what has been told already."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str | None], GpuReading] = {}
        self._when_told: dict[tuple[int, str | None], GpuReading] = {}
        self._told: dict[tuple[str, int, str], float] = {}

    def news(
        self, readings: Iterable[GpuReading], *, life: str, now: float, missing: Iterable[GpuFinding] = ()
    ) -> tuple[GpuFinding, ...]:
        """The findings of this look, and those `missing`, that were not told yet: each once per GPU and kind in a `life`.

        A new life of the agent tells again what is still wrong: what the old one said went down with it. What is still wrong
        `RETELL_S` later is told again; of what is counted that means that the count has risen since. `now` is monotonic.
        """
        news = [found for found in missing if self._is_news(life, found, now, again=True)]
        for gpu in readings:
            same = (gpu.index, gpu.uuid)  # a GPU that was replaced begins anew
            before, told = self._before.get(same), self._when_told.get(same)
            again = {found.kind for found in judge(_with_counts(before, told), gpu)}
            fresh = [found for found in judge(before, gpu) if self._is_news(life, found, now, again=found.kind in again)]
            self._before[same] = baseline(before, gpu)
            self._when_told[same] = gpu if fresh else baseline(told, gpu)
            news += fresh
        return tuple(news)

    def _is_news(self, life: str, found: GpuFinding, now: float, *, again: bool) -> bool:
        """Whether it was never told in this life, or is there `again` and was told long ago."""
        key = (life, found.gpu, found.kind)
        is_news = key not in self._told or (again and now - self._told[key] >= RETELL_S)
        if is_news:
            self._told[key] = now
        return is_news


def _with_counts(before: GpuReading | None, told: GpuReading | None) -> GpuReading | None:
    """The baseline with the ECC errors that were counted when something was told of the GPU."""
    if before is None or told is None:
        return before
    counts = {name: getattr(told, name) for name in ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate")}
    return replace(before, **counts)


def baseline(before: GpuReading | None, now: GpuReading) -> GpuReading:
    """What later looks are compared with.

    That is the lowest ECC count seen, since a driver that is loaded anew counts from 0; every link that has ever been up;
    and of the other errors the newest count, since what matters is how fast it rises.
    """
    looks = [look for look in (before, now) if look]
    links = [link for look in looks for link in look.nvlinks_up or ()]
    has_links = any(look.nvlinks_up is not None for look in looks)
    return replace(
        now,
        ecc_uncorrected_volatile=_lowest(look.ecc_uncorrected_volatile for look in looks),
        ecc_uncorrected_aggregate=_lowest(look.ecc_uncorrected_aggregate for look in looks),
        nvlinks_up=tuple(sorted(set(links))) if has_links else None,
    )


def _lowest(counts: Iterable[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)


class GpuInventory:
    """Which GPUs there must be: `num_gpus` of them if that is known, never fewer than in any look, the same ones in a life."""

    def __init__(self, *, num_gpus: int = 0) -> None:
        self._num_gpus = num_gpus
        self._life = ""
        self._known: dict[str, GpuReading] = {}

    def missing(self, readings: Sequence[GpuReading], *, life: str) -> tuple[GpuFinding, ...]:
        """The GPUs that the driver does not have any more; `readings` are all it has, lost ones included.

        A GPU is known by its UUID, as those behind a missing one move up. In a new life of the agent a GPU that stands
        where another was has replaced it.
        """
        if life != self._life:
            self._life, self._known = life, {}
        self._num_gpus = max(self._num_gpus, len(readings))
        here = {gpu.uuid: gpu for gpu in readings if gpu.uuid}
        gone = [gpu for uuid, gpu in self._known.items() if uuid not in here and not _stands_unnamed(readings, gpu.index)]
        self._known |= {uuid: gpu for uuid, gpu in here.items() if uuid not in self._known}
        found = [finding("gpu_lost", gpu, f"is gone: {_what_stands_there(readings, gpu.index)}") for gpu in gone]
        short = self._num_gpus - len(readings) - len(gone)
        counts = f"is missing: the driver counts {len(readings)} GPUs, there must be {self._num_gpus}"
        unknown = (GpuReading(index=len(readings) + number) for number in range(short))
        return (*found, *(finding("gpu_lost", gpu, counts) for gpu in unknown))


def _stands_unnamed(readings: Sequence[GpuReading], index: int) -> bool:
    """A GPU that does not tell its UUID may be the one that is looked for."""
    return index < len(readings) and readings[index].uuid is None


def _what_stands_there(readings: Sequence[GpuReading], index: int) -> str:
    if index >= len(readings):
        return f"the driver counts {len(readings)} GPUs"
    return f"the driver has {readings[index].uuid} as GPU {index}"
