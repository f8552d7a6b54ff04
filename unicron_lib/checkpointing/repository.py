"""A job's checkpoints on the object store: visible only when complete, refused when of a replaced generation.

    jobs/<job>/shards/i<iteration>-g<generation>-<save>/r<rank>.safetensors     one a rank, and <...>.json beside it
    jobs/<job>/manifests/<inverted iteration>-<inverted generation>.json        written last, only if absent
    jobs/<job>/condemned/<the manifest's name>                                  why a checkpoint must not be used
    jobs/<job>/fences/<inverted generation>...json                              what older generations had committed

Inverted numbers make the newest the first key listed. A fence is written once by whoever replaces a generation. It
names the manifests that count; a manifest that an older generation commits afterwards is not among them and does not
exist for anybody (`fences.py`).
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from unicron_lib.checkpointing.checkpoint_keys import folder_of, generation_of, place_of, sidecar_of
from unicron_lib.checkpointing.fences import Fence, Fences
from unicron_lib.checkpointing.manifest import (
    LATER_FORMAT,
    Manifest,
    Shard,
    dump_manifest,
    dump_shard,
    parse_key,
    parse_manifest,
    parse_shard,
)
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.checkpointing.store import Arrived, ObjectStore, ignore
from unicron_lib.errors import CheckpointError, ObjectNotFound, StaleGeneration

log = logging.getLogger(__name__)
DEADLINE_S = 600.0
"""How long the upload or download of one shard may take, all its repetitions included."""


class CheckpointRepository:
    """Save, find, verify and retire the checkpoints of one job. Bytes in, bytes out; safe to share between threads."""

    def __init__(self, store: ObjectStore, job: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._store = store
        self._job = job
        self._root = f"jobs/{job}"
        self._deadline_s = deadline_s
        self._fences = Fences(store, self._root)

    # --- writing -----------------------------------------------------------------------------------------------------

    def put_shard(
        self,
        *,
        iteration: int,
        generation: int,
        save: str,
        rank: int,
        data: bytes | bytearray | memoryview,
        tensors: tuple[str, ...],
        slices: Mapping[str, TensorSlice] = MappingProxyType({}),
    ) -> Shard:
        """Write one rank's shard, then its sidecar. `save` tells apart several saves of one iteration and generation.

        `slices` says of each tensor where it lies in the whole one, of none if all are whole.

        Raises StoreError when that takes longer than the deadline. `data` must not change meanwhile.
        """
        key = f"{folder_of(self._root, iteration, generation, save)}/r{rank}.safetensors"
        digest = self._send(key, memoryview(data))
        shard = Shard(key=key, num_bytes=len(data), sha256=digest, tensors=tensors, slices=dict(slices))
        self._store.put(sidecar_of(key), dump_shard(shard))
        return shard

    def _send(self, key: str, data: memoryview) -> str:
        """Upload `data`; returns its SHA-256, which is computed meanwhile."""
        with ThreadPoolExecutor(1) as hashing:
            digest = hashing.submit(lambda: hashlib.sha256(data).hexdigest())
            sent = self._store.upload(key, data, deadline_s=self._deadline_s)
            if sent.attempts > sent.parts:
                log.warning("%s took %.1f s and %d attempts for %d parts", key, sent.elapsed_s, sent.attempts, sent.parts)
            return digest.result()

    def find_shards(self, *, iteration: int, generation: int, save: str, num_ranks: int) -> tuple[Shard, ...] | None:
        """The shards of a save if all its ranks have written theirs, else None."""
        folder = folder_of(self._root, iteration, generation, save)
        there = set(self._store.list(f"{folder}/"))
        keys = [f"{folder}/r{rank}.safetensors" for rank in range(num_ranks)]
        if not all(sidecar_of(key) in there for key in keys):
            return None
        shards = tuple(parse_shard(self._store.get(sidecar_of(key))) for key in keys)
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

    def fence(self, generation: int, *, anew: bool = False, up_to: int | None = None, forgets: bool = False) -> tuple[str, ...]:
        """From here on generations below `generation` commit nothing. Call it after draining them. Twice is fine.

        Returns the keys of the manifests that count now, the newest first.

        With `anew` nothing that they saved counts any more, with `up_to` nothing that is newer than that iteration. With
        `forgets` (and with these two) nothing that nodes have of them in memory does, now and later.
        Raises StaleGeneration if a newer one has been fenced already: what it has written by then means nothing.
        """
        self._fences.close(generation)
        newest, closing = self._fences.newest_and_closing()
        if closing > generation:
            raise StaleGeneration(f"job {self._job}: generation {generation} was replaced by {closing}")
        if newest and newest.generation == generation:
            return tuple(self._counting(newest))
        keys = () if anew else tuple(self._counting(newest))
        if up_to is not None:
            keys = tuple(key for key in keys if parse_key(self._job, key)[0] <= up_to)
        before = newest.memory_from if newest else 0
        memory_from = generation if forgets or anew or up_to is not None else before
        return self._fences.write(Fence(generation=generation, admitted=keys, memory_from=memory_from)).admitted

    def memory_from(self) -> int:
        """The oldest generation whose states in the memory of nodes count."""
        newest = self._fences.newest()
        return newest.memory_from if newest else 0

    def condemn(self, key: str, reason: str) -> None:
        """Mark a checkpoint that turned out to be damaged when it was loaded: nobody tries it again."""
        parse_key(self._job, key)
        self._store.put(self._condemned_key(key), reason.encode())

    # --- reading -----------------------------------------------------------------------------------------------------

    def newest_complete(self, keys: Iterable[str] | None = None, *, condemn: bool = False) -> tuple[Manifest | None, list[str]]:
        """The newest checkpoint whose shards are all there in their sizes, and why newer ones were skipped.

        `keys` are those of the manifests that count, if they are known. With `condemn` those that are damaged are marked, so
        that nobody tries them again.
        """
        skipped: list[str] = []
        condemned = self.condemned()
        for key in self.manifest_keys() if keys is None else keys:
            reason = condemned.get(key)
            if reason is None:
                manifest, reason = self.look_at(key)
                if manifest and not reason:
                    return manifest, skipped
                if condemn and LATER_FORMAT not in reason:
                    self.condemn(key, reason)
            skipped.append(f"{key}: {reason}")
        return None, skipped

    def look_at(self, key: str, there: Mapping[str, int] | None = None) -> tuple[Manifest | None, str]:
        """The manifest under `key` if it can be read, and why the checkpoint cannot be used; empty if it looks right.

        `there` are the sizes of shards that have been listed since the manifest's key was.
        """
        try:
            manifest = self.load_manifest(key)
        except CheckpointError as error:
            return None, str(error)
        return manifest, self._incomplete(manifest, there)

    def iterations(self) -> list[int]:
        """Of the checkpoints that count, the newest first; some may turn out to be incomplete."""
        return [parse_key(self._job, key)[0] for key in self.manifest_keys()]

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

    def load_shards(
        self, manifest: Manifest, *, limit_bytes: int | None = None, arrived: Arrived = ignore
    ) -> Iterator[bytearray]:
        """The shards' bytes, each verified before it is handed out; raises CheckpointError.

        No memory is taken for a shard before the store has confirmed its size, nor for a checkpoint of more than `limit_bytes`.
        `arrived` is told how many bytes of all shards are there.
        """
        if limit_bytes is not None and manifest.num_bytes > limit_bytes:
            raise CheckpointError(f"{manifest.key} has {manifest.num_bytes} bytes, the job's state at most {limit_bytes}")
        done = 0
        for shard in manifest.shards:
            yield self.load_shard(shard, arrived=lambda there, before=done: arrived(before + there))  # type: ignore[misc]
            done += shard.num_bytes

    def load_shard(self, shard: Shard, *, arrived: Arrived = ignore) -> bytearray:
        """One shard's bytes, verified while they arrive; raises CheckpointError, or StoreError at the deadline."""
        if reason := shard.lacks(self._size_of(shard)):
            raise CheckpointError(reason)
        data = bytearray(shard.num_bytes)
        view, digest, hashed = memoryview(data), hashlib.sha256(), 0

        def take(there: int) -> None:
            nonlocal hashed
            digest.update(view[hashed:there])
            hashed = there
            arrived(there)

        try:
            self._store.download(shard.key, view, deadline_s=self._deadline_s, arrived=take)
        except ObjectNotFound as error:
            raise CheckpointError(f"shard {shard.key} is missing") from error
        if digest.hexdigest() != shard.sha256:
            raise CheckpointError(f"shard {shard.key} is damaged: it has another SHA-256 than its manifest says")
        return data

    # --- retention ---------------------------------------------------------------------------------------------------

    def collect(self, *, retain: int, generation: int, reach: int | None = None) -> int:
        """Delete checkpoints older than the newest `retain` complete ones; returns how many were deleted.

        More are kept until one of them is of iteration `reach` or before.
        Called by a writer of `generation`: nothing of newer generations is touched, nor anything while fewer than
        `retain` are complete, nor shards of saves that are newer than the oldest one kept.
        """
        if retain < 1:
            raise ValueError(f"retain is {retain}, at least the last good checkpoint must stay")
        fence, closing = self._fences.newest_and_closing()
        if closing > generation:
            return 0
        self._give_up_uploads(below=fence.generation if fence else 0)
        keys, there = self._counting(fence), self._store.sizes(f"{self._root}/shards/")
        kept, behind = self._split(keys, there, retain, reach)
        doomed = [key for key in behind if parse_key(self._job, key)[1] <= generation]
        for key in doomed:
            self._store.delete(key)
            self._store.delete(self._condemned_key(key))
        if self._is_enough(kept, retain, reach):
            self._delete_shards(there, before=kept[-1].iteration, generation=generation)
        return len(doomed)

    def _split(
        self, keys: Iterable[str], there: Mapping[str, int], retain: int, reach: int | None
    ) -> tuple[list[Manifest], list[str]]:
        """The newest complete checkpoints that are to stay, and the keys of all that are behind the last of them."""
        condemned = self.condemned()
        kept: list[Manifest] = []
        behind: list[str] = []
        for key in keys:
            if self._is_enough(kept, retain, reach):
                behind.append(key)
            elif key not in condemned:
                manifest, reason = self.look_at(key, there)
                if manifest and not reason:
                    kept.append(manifest)
        return kept, behind

    def _give_up_uploads(self, *, below: int) -> None:
        """Remove what writers of generations that were replaced have begun to write, and will not finish."""
        for key in self._store.unfinished(f"{self._root}/"):
            generation = generation_of(key)
            if generation is not None and generation < below:
                self._store.give_up(key)

    @staticmethod
    def _is_enough(kept: list[Manifest], retain: int, reach: int | None) -> bool:
        return len(kept) >= retain and (reach is None or kept[-1].iteration <= reach)

    def _delete_shards(self, there: Iterable[str], *, before: int, generation: int) -> None:
        for key in there:
            place = place_of(key)
            if place and place[0] < before and place[1] <= generation:
                self._store.delete(key)

    # --- keys and fences -------------------------------------------------------------------------------------------

    def _incomplete(self, manifest: Manifest, there: Mapping[str, int] | None = None) -> str:
        """Why the checkpoint cannot be loaded, empty if it looks right from outside: `there` are the sizes of its shards."""
        if there is None:
            folders = {shard.folder for shard in manifest.shards}
            there = {key: size for folder in folders for key, size in self._store.sizes(folder).items()}
        return next((reason for shard in manifest.shards if (reason := shard.lacks(there.get(shard.key)))), "")

    def _size_of(self, shard: Shard) -> int | None:
        try:
            return self._store.size(shard.key)
        except ObjectNotFound:
            return None

    def condemned(self) -> dict[str, str]:
        """The reasons against checkpoints that must not be used, by their manifests' keys."""
        marks = self._store.list(f"{self._root}/condemned/")
        return {key.replace("/condemned/", "/manifests/"): self._store.get(key).decode(errors="replace") for key in marks}

    def _condemned_key(self, key: str) -> str:
        return f"{self._root}/condemned/{key.rpartition('/')[2]}"

    def all_manifest_keys(self) -> list[str]:
        """Keys of all manifests, newest first, also of those that have been fenced off."""
        return self._store.list(f"{self._root}/manifests/")

    def saves(self) -> set[tuple[int, int]]:
        """Iteration and generation of everything that shards are there of."""
        return {place for key in self._store.list(f"{self._root}/shards/") if (place := place_of(key))}

    def manifest_keys(self) -> list[str]:
        """Keys of the manifests that count, newest first."""
        return self._counting(self._fences.newest())

    def _counting(self, fence: Fence | None) -> list[str]:
        return [key for key in self.all_manifest_keys() if self._counts(key, fence)]

    def _counts(self, key: str, fence: Fence | None) -> bool:
        try:
            generation = parse_key(self._job, key)[1]
        except CheckpointError:  # somebody else has put it there
            return False
        return fence is None or key in fence.admitted or generation >= fence.generation

    def _refuse_stale(self, generation: int, *, key: str | None) -> None:
        fence, closing = self._fences.newest_and_closing()
        is_admitted = fence is not None and fence.generation == closing and key in fence.admitted
        if closing > generation and not is_admitted:
            raise StaleGeneration(f"job {self._job}: generation {generation} was replaced by {closing}, nothing was saved")
