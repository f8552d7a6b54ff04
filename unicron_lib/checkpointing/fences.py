"""Fences: which checkpoints count once a generation has been replaced. Two objects a generation, each written once.

    jobs/<job>/fences/<inverted generation>-closing.json     from here on older generations commit nothing
    jobs/<job>/fences/<inverted generation>.json             what they had committed

The first is written before the manifests are listed, the second after. So a commit of an older generation that found
neither is among those listed; one that is too late for the list finds the first, and refuses. No lock is needed.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from unicron_lib.checkpointing.manifest import LARGEST
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import CheckpointError

CLOSING = "-closing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Generations below `generation` write no more; of theirs only the manifests in `admitted` count.

    States in the memory of nodes count if their generation is at least `memory_from`.
    """

    generation: int
    admitted: tuple[str, ...]
    memory_from: int = 0


_fence: TypeAdapter[Fence] = TypeAdapter(Fence)


class Fences:
    """The fences of one job under `root`."""

    def __init__(self, store: ObjectStore, root: str) -> None:
        self._store = store
        self._prefix = f"{root}/fences/"

    def newest(self) -> Fence | None:
        """The one that says what counts; raises CheckpointError if it cannot be read."""
        return next((self._read(key) for key in self._keys() if not key.endswith(CLOSING)), None)

    def newest_and_closing(self) -> tuple[Fence | None, int]:
        """The same, and the generation that has begun to replace older ones, which may be newer; -1 if there is none."""
        keys = self._keys()
        closing = (LARGEST - int(number) for key in keys[:1] if (number := key[len(self._prefix) :][:10]).isdigit())
        return next((self._read(key) for key in keys if not key.endswith(CLOSING)), None), next(closing, -1)

    def close(self, generation: int) -> None:
        """Have older generations commit no more. Twice is fine."""
        self._store.put_if_absent(self._key(generation).removesuffix(".json") + CLOSING, b"{}")

    def write(self, fence: Fence) -> Fence:
        """Say what counts; the first to say so for a generation is right, and returned."""
        key = self._key(fence.generation)
        return fence if self._store.put_if_absent(key, _fence.dump_json(fence)) else self._read(key)

    def _keys(self) -> list[str]:
        return self._store.list(self._prefix)

    def _key(self, generation: int) -> str:
        return f"{self._prefix}{LARGEST - generation:010d}.json"

    def _read(self, key: str) -> Fence:
        try:
            return _fence.validate_json(self._store.get(key))
        except ValidationError as error:
            raise CheckpointError(f"{key} is damaged; delete it to lift the fence") from error
