"""Where the state of a generation came from, as its ranks tell. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from unicron_lib.agent.rank_messages import SLOT, Progress
from unicron_lib.domain.events import Scalar

OWN_MEMORY, ANOTHER = "own memory", "rank "


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a rank came into its generation: see `Progress`."""

    source: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    kept_micro_batches: int = 0
    recomputed_micro_batches: int = 0
    discarded_micro_batches: int = 0

    @property
    def is_memory(self) -> bool:
        """Whether its state was in the memory of a rank or a node, and not in the store."""
        return self.source == OWN_MEMORY or self.source.startswith((ANOTHER, SLOT))


def origin_of(progress: Progress) -> Origin:
    """What a rank tells of it with each iteration."""
    return Origin(
        source=progress.source,
        copied_bytes=progress.copied_bytes,
        copy_s=progress.copy_s,
        kept_micro_batches=progress.kept_micro_batches,
        recomputed_micro_batches=progress.recomputed_micro_batches,
        discarded_micro_batches=progress.discarded_micro_batches,
    )


def told(origins: Mapping[int, Origin]) -> str:
    """In plain words, for people; empty if the ranks tell nothing of it."""
    own = sum(origin.source == OWN_MEMORY for origin in origins.values())
    parts = [f"own memory of {_ranks(own)}"] if own else []
    parts += [_copied(rank, origin) for rank, origin in sorted(origins.items()) if origin.source.startswith(ANOTHER)]
    slots = [origin.source for origin in origins.values() if origin.source.startswith(SLOT)]
    parts += [f"{slot} for {_ranks(slots.count(slot))}" for slot in sorted(set(slots))]
    stored = sorted({origin.source for origin in origins.values() if origin.source and not origin.is_memory})
    parts += [f"the checkpoint {key}" for key in stored]
    return ", ".join(parts) + _work(origins)


def _work(origins: Mapping[int, Origin]) -> str:
    """What has become of the iteration under way."""
    kept = sum(origin.kept_micro_batches for origin in origins.values())
    again = sum(origin.recomputed_micro_batches for origin in origins.values())
    lost = sum(origin.discarded_micro_batches for origin in origins.values())
    if not (kept or again or lost):
        return ""
    return f"; {kept} micro-batches kept, {again} computed again{f', {lost} discarded' if lost else ''}"


def origin_told(origins: Mapping[int, Origin], *, held: Scalar, stored: Scalar) -> dict[str, Scalar]:
    """What the ranks tell of their origins, and after which iteration they went on; nothing if they tell nothing.

    `held` is the iteration that was in the memory of ranks that lived on, or of nodes, `stored` that of the checkpoint to fall
    back on.
    """
    if not any(origin.source for origin in origins.values()):
        return {}
    in_memory = any(origin.is_memory for origin in origins.values())
    return {
        "from": told(origins),
        "went_on_after": held if in_memory and held is not None else stored,
        "kept_micro_batches": sum(origin.kept_micro_batches for origin in origins.values()),
        "recomputed_micro_batches": sum(origin.recomputed_micro_batches for origin in origins.values()),
        "discarded_micro_batches": sum(origin.discarded_micro_batches for origin in origins.values()),
        "copied_bytes": sum(origin.copied_bytes for origin in origins.values()),
    }


def _copied(rank: int, origin: Origin) -> str:
    return f"rank {rank} copied {_size(origin.copied_bytes)} from {origin.source} in {origin.copy_s:.2f} s"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
