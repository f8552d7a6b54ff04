"""A job's checkpoints on the object store: visible only when complete, refused when of a replaced generation.

    jobs/<job>/shards/i<iteration>-g<generation>-<save>/r<rank>.safetensors     one a rank, and <...>.json beside it
    jobs/<job>/manifests/<inverted iteration>-<inverted generation>.json        written last, only if absent
    jobs/<job>/condemned/<the manifest's name>                                  why a checkpoint must not be used
    jobs/<job>/fences/<inverted generation>.json                                what older generations had committed

Inverted numbers make the newest the first key listed. A fence is written once by whoever replaces a generation. It
names the manifests that count; a manifest that an older generation commits afterwards is not among them and does not
exist for anybody. So no lock is needed between a commit and a fence: the fence's own write decides.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from unicron_lib.checkpointing.manifest import (
    LARGEST,
    Manifest,
    Shard,
    dump_manifest,
    dump_shard,
    parse_key,
    parse_manifest,
    parse_shard,
)
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import CheckpointError, ObjectNotFound, StaleGeneration


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Generations below `generation` write no more; of theirs only the manifests in `admitted` count."""

    generation: int
    admitted: tuple[str, ...]


_fence: TypeAdapter[Fence] = TypeAdapter(Fence)


class CheckpointRepository:
    """Save, find, verify and retire the checkpoints of one job. Bytes in, bytes out; safe to share between threads."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._root = f"jobs/{job}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def put_shard(
        self, *, iteration: int, generation: int, save: str, rank: int, data: bytes, tensors: tuple[str, ...]
    ) -> Shard:
        """Write one rank's shard, then its sidecar. `save` tells apart several saves of one iteration and generation."""
        key = f"{self._folder(iteration, generation, save)}/r{rank}.safetensors"
        shard = Shard(key=key, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), tensors=tensors)
        self._store.put(key, data)
        self._store.put(_sidecar(key), dump_shard(shard))
        return shard

    def find_shards(self, *, iteration: int, generation: int, save: str, num_ranks: int) -> tuple[Shard, ...] | None:
        """The shards of a save if all its ranks have written theirs, else None."""
        folder = self._folder(iteration, generation, save)
        there = set(self._store.list(f"{folder}/"))
        keys = [f"{folder}/r{rank}.safetensors" for rank in range(num_ranks)]
        if not all(_sidecar(key) in there for key in keys):
            return None
        shards = tuple(parse_shard(self._store.get(_sidecar(key))) for key in keys)
        if [shard.key for shard in shards] != keys:
            raise CheckpointError(f"{folder}: sidecars name other shards")
        return shards

    def commit(self, manifest: Manifest) -> str:
        """Make the checkpoint exist; returns the manifest's key. Twice is fine, and so is an equal iteration by another save.

        Raises StaleGeneration when the generation has been replaced, CheckpointError when a shard is not there.
        """
        self._refuse_stale(manifest.generation, key=None)
        reason = self._incomplete(manifest)
        if reason:
            raise CheckpointError(reason)
        if not self._store.put_if_absent(manifest.key, dump_manifest(manifest)):
            reason = self._incomplete(self.load_manifest(manifest.key))
            if reason:
                raise CheckpointError(f"iteration {manifest.iteration} was committed before, but {reason}")
        self._refuse_stale(manifest.generation, key=manifest.key)
        return manifest.key

    def fence(self, generation: int, *, anew: bool = False, up_to: int | None = None) -> None:
        """From here on generations below `generation` commit nothing. Call it after draining them. Twice is fine.

        With `anew` nothing that they saved counts any more, with `up_to` nothing that is newer than that iteration.
        Raises StaleGeneration if a newer one has been fenced already.
        """
        newest = self._newest_fence()
        if newest and newest.generation >= generation:
            if newest.generation > generation:
                raise StaleGeneration(f"job {self._job}: generation {generation} was replaced by {newest.generation}")
            return
        keys = () if anew else tuple(self._manifest_keys())
        if up_to is not None:
            keys = tuple(key for key in keys if parse_key(self._job, key)[0] <= up_to)
        fence = Fence(generation=generation, admitted=keys)
        self._store.put_if_absent(self._fence_key(generation), _fence.dump_json(fence))

    def condemn(self, key: str, reason: str) -> None:
        """Mark a checkpoint that turned out to be damaged when it was loaded: nobody tries it again."""
        parse_key(self._job, key)
        self._store.put(self._condemned_key(key), reason.encode())

    # --- reading -----------------------------------------------------------------------------------------------------

    def newest_complete(self) -> tuple[Manifest | None, list[str]]:
        """The newest checkpoint whose shards are all there in their sizes, and why newer ones were skipped."""
        skipped: list[str] = []
        condemned = self._condemned()
        for key in self._manifest_keys():
            try:
                manifest = self.load_manifest(key)
                reason = condemned.get(key) or self._incomplete(manifest)
            except CheckpointError as error:
                reason = str(error)
            else:
                if not reason:
                    return manifest, skipped
            skipped.append(f"{key}: {reason}")
        return None, skipped

    def iterations(self) -> list[int]:
        """Of the checkpoints that count, the newest first; some may turn out to be incomplete."""
        return [parse_key(self._job, key)[0] for key in self._manifest_keys()]

    def load_manifest(self, key: str) -> Manifest:
        """Read a manifest of this job; raises CheckpointError if it is damaged, missing or another job's."""
        iteration, generation = parse_key(self._job, key)
        try:
            manifest = parse_manifest(self._store.get(key))
        except ObjectNotFound as error:
            raise CheckpointError(f"there is no checkpoint {key}: {error}") from error
        if (manifest.job, manifest.iteration, manifest.generation) != (self._job, iteration, generation):
            raise CheckpointError(
                f"{key} holds iteration {manifest.iteration} of generation {manifest.generation} of job {manifest.job}"
            )
        return manifest

    def load_shards(self, manifest: Manifest) -> Iterator[bytes]:
        """The shards' bytes, each verified before it is handed out; raises CheckpointError."""
        for shard in manifest.shards:
            try:
                data = self._store.get(shard.key)
            except ObjectNotFound as error:
                raise CheckpointError(f"shard {shard.key} is missing") from error
            if len(data) != shard.num_bytes or hashlib.sha256(data).hexdigest() != shard.sha256:
                raise CheckpointError(
                    f"shard {shard.key} is damaged: {len(data)} of {shard.num_bytes} bytes, or another SHA-256"
                )
            yield data

    # --- retention ---------------------------------------------------------------------------------------------------

    def collect(self, *, retain: int, generation: int, reach: int | None = None) -> int:
        """Delete checkpoints older than the newest `retain` complete ones; returns how many were deleted.

        More are kept until one of them is of iteration `reach` or before.
        Called by a writer of `generation`: nothing of newer generations is touched, nor anything while fewer than
        `retain` are complete, nor shards of saves that are newer than the oldest one kept.
        """
        if retain < 1:
            raise ValueError(f"retain is {retain}, at least the last good checkpoint must stay")
        kept, behind = self._split(retain, reach)
        doomed = [manifest for manifest in behind if manifest.generation <= generation]
        for manifest in doomed:
            self._store.delete(manifest.key)
            self._store.delete(self._condemned_key(manifest.key))
        if self._is_enough(kept, retain, reach):
            self._delete_shards(before=kept[-1].iteration, generation=generation)
        return len(doomed)

    def _split(self, retain: int, reach: int | None) -> tuple[list[Manifest], list[Manifest]]:
        """The newest complete checkpoints that are to stay, and all readable ones behind the last of them."""
        condemned = self._condemned()
        kept: list[Manifest] = []
        behind: list[Manifest] = []
        for key in self._manifest_keys():
            try:
                manifest = self.load_manifest(key)
            except CheckpointError:
                continue
            if self._is_enough(kept, retain, reach):
                behind.append(manifest)
            elif key not in condemned and not self._incomplete(manifest):
                kept.append(manifest)
        return kept, behind

    @staticmethod
    def _is_enough(kept: list[Manifest], retain: int, reach: int | None) -> bool:
        return len(kept) >= retain and (reach is None or kept[-1].iteration <= reach)

    def _delete_shards(self, *, before: int, generation: int) -> None:
        for key in self._store.list(f"{self._root}/shards/"):
            iteration, _, rest = key.split("/")[3].removeprefix("i").partition("-g")
            of_generation = rest.partition("-")[0]
            if iteration.isdigit() and of_generation.isdigit() and int(iteration) < before and int(of_generation) <= generation:
                self._store.delete(key)

    # --- keys and fences -------------------------------------------------------------------------------------------

    def _incomplete(self, manifest: Manifest) -> str:
        """Why the checkpoint cannot be loaded, empty if it looks right from outside."""
        for shard in manifest.shards:
            try:
                size = self._store.size(shard.key)
            except ObjectNotFound:
                return f"shard {shard.key} is missing"
            if size != shard.num_bytes:
                return f"shard {shard.key} has {size} of {shard.num_bytes} bytes"
        return ""

    def _condemned(self) -> dict[str, str]:
        """The reasons against checkpoints that must not be used, by their manifests' keys."""
        marks = self._store.list(f"{self._root}/condemned/")
        return {key.replace("/condemned/", "/manifests/"): self._store.get(key).decode(errors="replace") for key in marks}

    def _condemned_key(self, key: str) -> str:
        return f"{self._root}/condemned/{key.rpartition('/')[2]}"

    def _manifest_keys(self) -> list[str]:
        """Keys of the manifests that count, newest first."""
        fence = self._newest_fence()
        keys = self._store.list(f"{self._root}/manifests/")
        return [key for key in keys if fence is None or key in fence.admitted or self._is_since(fence, key)]

    def _is_since(self, fence: Fence, key: str) -> bool:
        try:
            return parse_key(self._job, key)[1] >= fence.generation
        except CheckpointError:
            return False

    def _newest_fence(self) -> Fence | None:
        for key in self._store.list(f"{self._root}/fences/"):
            try:
                return _fence.validate_json(self._store.get(key))
            except ValidationError as error:
                raise CheckpointError(f"{key} is damaged; delete it to lift the fence") from error
        return None

    def _refuse_stale(self, generation: int, *, key: str | None) -> None:
        fence = self._newest_fence()
        if fence and fence.generation > generation and key not in fence.admitted:
            raise StaleGeneration(
                f"job {self._job}: generation {generation} was replaced by {fence.generation}, nothing was saved"
            )

    def _folder(self, iteration: int, generation: int, save: str) -> str:
        return f"{self._root}/shards/i{iteration:010d}-g{generation}-{save}"

    def _fence_key(self, generation: int) -> str:
        return f"{self._root}/fences/{LARGEST - generation:010d}.json"


def _sidecar(key: str) -> str:
    return key.removesuffix(".safetensors") + ".json"
