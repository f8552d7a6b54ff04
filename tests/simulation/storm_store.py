"""The object store of a storm: the journal's entries, and the checkpoints of jobs behind their fences."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from storm_kernel import Kernel
from storm_witness import Broken, Witness

import unicron_lib.journal as production
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event
from unicron_lib.domain.journal import fold
from unicron_lib.errors import ObjectNotFound, StaleGeneration, StoreError


class _Json:
    """Entries by what names them: that they survive JSON is another test's business."""

    def __init__(self) -> None:
        self._known: dict[bytes, production.Entry] = {}

    def dump_json(self, entry: production.Entry) -> bytes:
        data = f"{entry.seq} {entry.writer} {id(entry.event)}".encode()
        self._known[data] = entry
        return data

    def validate_json(self, data: bytes) -> production.Entry:
        return self._known[data]


class _Fold:
    """The fold, once for all who read the same entry after the same ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[ClusterState, Event, ClusterState]] = {}

    def __call__(self, state: ClusterState, event: Event) -> ClusterState:
        key = id(state) if state.seq >= 0 else 0, id(event)
        if key not in self._known:
            self._known[key] = state, event, fold(state, event)
        return self._known[key][2]


@contextmanager
def remembered() -> Iterator[None]:
    """Within, journals share what they have read: a thousand storms are a million entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(production, "_entry_json", _Json())
        patch.setattr(production, "fold", _Fold())
        yield


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`batches` are what its parameters have learned from, one an iteration."""

    generation: int
    batches: tuple[int, ...]

    @property
    def iteration(self) -> int:
        return len(self.batches) - 1

    @property
    def key(self) -> str | None:
        return f"{self.generation}/{self.iteration}" if self.batches else None


NOTHING = Checkpoint(0, ())


@dataclass
class Store:
    """An object store in memory. While it is `away` it refuses; while `mumbling`, a write may land and its answer be lost."""

    kernel: Kernel
    witness: Witness
    away: bool = False
    mumbling: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    saved: dict[str, list[Checkpoint]] = field(default_factory=dict)
    kept: dict[tuple[str, str], Checkpoint] = field(default_factory=dict)

    def _listen(self) -> None:
        if self.away:
            raise StoreError("the store is out of reach")

    def _speak(self) -> None:
        if self.mumbling and self.kernel.rng.random() < 0.3:
            raise StoreError("the store's answer was lost")

    def get(self, key: str) -> bytes:
        self._listen()
        if key not in self.objects:
            raise ObjectNotFound(key)
        self._speak()
        return self.objects[key]

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.kernel.rng.random() < 0.05:
            self.kernel.hold_up(0.3)  # others write meanwhile
        self._listen()
        if key in self.objects:
            self._speak()
            return self.objects[key] == data
        self.objects[key] = data
        if key.startswith("journal/"):
            self.witness.see(production._entry_json.validate_json(data).event)
        self._speak()
        return True

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        self._listen()
        self._speak()
        return sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)

    # --- checkpoints

    def newest(self, job: str) -> Checkpoint:
        """The newest that counts, in the order of the manifests' keys; NOTHING if none does."""
        return max(self.saved.get(job, ()), key=lambda it: (it.iteration, it.generation), default=NOTHING)

    def fence(self, job: str, generation: int, *, anew: bool, up_to: int | None) -> Checkpoint:
        """From here on older generations cannot save, and what is `anew` or `up_to` an iteration forgets the rest.

        The newest that is left. Raises StaleGeneration if a newer one has been fenced, as `checkpointing.repository` does.
        """
        self._listen()
        closing = self.fences.get(job, 0)
        if closing > generation:
            raise StaleGeneration(f"job {job}: generation {generation} was replaced by {closing}")
        if closing < generation:
            self.fences[job] = generation
            known = () if anew else self.saved.get(job, ())
            self.saved[job] = [it for it in known if up_to is None or it.iteration <= up_to]
        self._speak()
        return self.newest(job)

    def save(self, job: str, generation: int, batches: tuple[int, ...]) -> Checkpoint | None:
        """A checkpoint, unless a newer generation has fenced this one off, or the store does not answer."""
        if self.away or generation < self.fences.get(job, 0):
            return None
        before, made = self.newest(job), Checkpoint(generation, batches)
        if generation < before.generation and made.iteration > before.iteration:
            raise Broken(f"{job}: a replaced generation, {generation}, saves {made.iteration}, behind {before}")
        self.saved.setdefault(job, []).append(made)
        self.kept[job, made.key] = made
        return made

    def load(self, job: str, key: str | None) -> Checkpoint:
        """What RESTORE has chosen; a checkpoint that counts no more is still there for who does not know."""
        return self.kept[job, key] if key else NOTHING
