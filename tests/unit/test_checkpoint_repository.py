"""A checkpoint is visible only when complete, never after its generation was replaced, and the last good one stays."""

from pathlib import Path

import pytest

from unicron_lib.adapters.files import FileStore
from unicron_lib.checkpointing.fences import Fences
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError, StaleGeneration


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


@pytest.fixture
def repository(store: FileStore) -> CheckpointRepository:
    return CheckpointRepository(store, "a")


def prepare(repository: CheckpointRepository, iteration: int, *, generation: int = 1, num_ranks: int = 2) -> Manifest:
    """Shards of all ranks, and the manifest that would make them a checkpoint."""
    for rank in range(num_ranks):
        data = f"{iteration}-{generation}-{rank}".encode() * 10
        repository.put_shard(
            iteration=iteration, generation=generation, save="all", rank=rank, data=data, tensors=(f"param.{rank}",)
        )
    shards = repository.find_shards(iteration=iteration, generation=generation, save="all", num_ranks=num_ranks)
    assert shards is not None
    return Manifest(
        job="a", generation=generation, iteration=iteration, loss=1.0, consumed_samples=8, layout=Layout(dp=2), shards=shards
    )


def save(repository: CheckpointRepository, iteration: int, *, generation: int = 1) -> Manifest:
    manifest = prepare(repository, iteration, generation=generation)
    assert repository.commit(manifest) == manifest.key
    return manifest


def newest(repository: CheckpointRepository) -> int | None:
    manifest, _ = repository.newest_complete()
    return manifest.iteration if manifest else None


def test_nothing_was_saved_yet(repository: CheckpointRepository) -> None:
    assert repository.newest_complete() == (None, [])


def test_the_newest_is_found_and_its_bytes_come_back(repository: CheckpointRepository) -> None:
    save(repository, 9)
    second = save(repository, 100)
    assert repository.newest_complete() == (second, [])
    assert list(repository.load_shards(second)) == [b"100-1-0" * 10, b"100-1-1" * 10]
    assert repository.load_manifest(second.key) == second


def test_shards_without_a_manifest_are_no_checkpoint(repository: CheckpointRepository) -> None:
    """The writer was killed before the manifest."""
    save(repository, 1)
    prepare(repository, 2)
    assert newest(repository) == 1


def test_a_save_is_complete_only_with_the_last_ranks_sidecar(repository: CheckpointRepository, store: FileStore) -> None:
    prepare(repository, 2)
    store.delete("jobs/a/shards/i0000000002-g1-all/r1.json")
    assert repository.find_shards(iteration=2, generation=1, save="all", num_ranks=2) is None


def truncate(store: FileStore, manifest: Manifest) -> None:
    store.put(manifest.shards[1].key, store.get(manifest.shards[1].key)[:7])


def remove(store: FileStore, manifest: Manifest) -> None:
    store.delete(manifest.shards[0].key)


def empty_manifest(store: FileStore, manifest: Manifest) -> None:
    store.put(manifest.key, b"")


def foreign_manifest(store: FileStore, manifest: Manifest) -> None:
    store.put(manifest.key, b'{"format": 1, "job": "b"}')


@pytest.mark.parametrize("damage", [truncate, remove, empty_manifest, foreign_manifest])
def test_a_damaged_checkpoint_is_skipped_with_its_reason(repository: CheckpointRepository, store: FileStore, damage) -> None:
    save(repository, 1)
    good = save(repository, 2)
    bad = save(repository, 3)
    damage(store, bad)
    manifest, skipped = repository.newest_complete()
    assert manifest == good
    assert [reason.startswith(bad.key) for reason in skipped] == [True]


def test_a_flipped_bit_is_found_before_the_bytes_are_used(repository: CheckpointRepository, store: FileStore) -> None:
    manifest = save(repository, 3)
    data = bytearray(store.get(manifest.shards[1].key))
    data[5] ^= 1
    store.put(manifest.shards[1].key, bytes(data))
    shards = repository.load_shards(manifest)
    assert next(shards) == b"3-1-0" * 10
    with pytest.raises(CheckpointError, match=r"r1.safetensors is damaged"):
        next(shards)


def test_a_condemned_checkpoint_is_not_tried_again(repository: CheckpointRepository) -> None:
    good, bad = save(repository, 2), save(repository, 3)
    repository.condemn(bad.key, "a bit was flipped")
    assert repository.newest_complete() == (good, [f"{bad.key}: a bit was flipped"])
    better = save(repository, 3, generation=2)
    assert repository.newest_complete() == (better, [])
    repository.collect(retain=1, generation=2)
    assert repository.newest_complete() == (better, [])


def test_a_manifest_is_not_committed_without_its_shards(repository: CheckpointRepository, store: FileStore) -> None:
    manifest = prepare(repository, 3)
    remove(store, manifest)
    with pytest.raises(CheckpointError, match=r"r0.safetensors is missing"):
        repository.commit(manifest)
    assert newest(repository) is None


def test_a_commit_may_run_twice(repository: CheckpointRepository) -> None:
    manifest = save(repository, 3)
    assert repository.commit(manifest) == manifest.key


def test_another_save_of_the_same_iteration_leaves_the_first(repository: CheckpointRepository) -> None:
    first = save(repository, 3)
    shard = repository.put_shard(iteration=3, generation=1, save="replica-1", rank=0, data=b"all", tensors=("param.0",))
    again = Manifest(job="a", generation=1, iteration=3, loss=1.0, consumed_samples=8, layout=Layout(dp=2), shards=(shard,))
    assert repository.commit(again) == first.key
    assert repository.newest_complete() == (first, [])


def test_a_replaced_generation_commits_nothing(repository: CheckpointRepository) -> None:
    save(repository, 1)
    late = prepare(repository, 2)
    repository.fence(2)
    with pytest.raises(StaleGeneration, match="generation 1 was replaced by 2"):
        repository.commit(late)
    assert newest(repository) == 1
    save(repository, 2, generation=2)
    assert newest(repository) == 2


def test_states_in_memory_count_from_the_generation_that_went_back_or_began_anew(repository: CheckpointRepository) -> None:
    assert repository.memory_from() == 0
    found = []
    for generation, how in enumerate(({}, {"up_to": 20}, {}, {"forgets": True}, {}, {"anew": True}, {}), start=2):
        repository.fence(generation, **how)
        repository.fence(generation)
        found.append(repository.memory_from())
    assert found == [0, 3, 3, 5, 5, 7, 7]


def test_a_fence_of_before_there_were_such_states_is_read(repository: CheckpointRepository, store: FileStore) -> None:
    repository.fence(2)
    (key,) = (key for key in store.list("jobs/a/fences/") if "closing" not in key)
    store.put(key, b'{"generation": 2, "admitted": []}')
    assert repository.memory_from() == 0


def test_a_commit_that_races_the_fence_does_not_exist(store: FileStore) -> None:
    """The fence is written between the commit's look at the fences and its manifest."""
    repository = CheckpointRepository(store, "a")

    class Racing(FileStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if "/manifests/" in key:
                repository.fence(2)
            return super().put_if_absent(key, data)

    save(repository, 1)
    racing = CheckpointRepository(Racing(Path(store.url.removeprefix("file://"))), "a")
    late = prepare(racing, 5)
    with pytest.raises(StaleGeneration):
        racing.commit(late)
    assert store.get(late.key), "the manifest was not written"
    assert newest(repository) == 1


def test_a_commit_while_the_fence_is_being_written_counts_or_is_refused(store: FileStore) -> None:
    """It comes after the fence has listed what there is, and before it is written."""
    repository = CheckpointRepository(store, "a")
    save(repository, 1)
    late = prepare(repository, 5)
    refused = []

    class Racing(FileStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if "/fences/" in key and "closing" not in key:
                with pytest.raises(StaleGeneration) as caught:
                    repository.commit(late)
                refused.append(caught.value)
            return super().put_if_absent(key, data)

    CheckpointRepository(Racing(Path(store.url.removeprefix("file://"))), "a").fence(2)
    assert refused
    assert newest(repository) == 1


def test_a_fence_whose_writer_died_halfway_is_written_by_the_next(store: FileStore, repository: CheckpointRepository) -> None:
    save(repository, 1)
    Fences(store, "jobs/a").close(2)
    with pytest.raises(StaleGeneration, match="generation 1 was replaced by 2"):
        save(repository, 2)
    assert newest(repository) == 1
    repository.fence(2)
    save(repository, 2, generation=2)
    assert newest(repository) == 2


def test_damaged_checkpoints_are_condemned_once(repository: CheckpointRepository, store: FileStore) -> None:
    good, bad, worse = save(repository, 1), save(repository, 2), save(repository, 3)
    truncate(store, bad)
    empty_manifest(store, worse)
    manifest, skipped = repository.newest_complete(condemn=True)
    assert (manifest, len(skipped)) == (good, 2)
    marks = repository.condemned()
    assert set(marks) == {bad.key, worse.key}
    assert "has 7 of 50 bytes" in marks[bad.key]
    store.put(worse.key, b"something else")
    assert repository.newest_complete(condemn=True) == (good, skipped)
    assert repository.condemned() == marks


def test_a_checkpoint_of_a_later_version_is_skipped_but_not_condemned(
    repository: CheckpointRepository, store: FileStore
) -> None:
    good, later = save(repository, 1), save(repository, 2)
    store.put(later.key, store.get(later.key).replace(b'"format": 1', b'"format": 3'))
    manifest, (reason,) = repository.newest_complete(condemn=True)
    assert manifest == good
    assert "written by a later version" in reason
    assert repository.condemned() == {}


def test_damaged_checkpoints_are_collected_once_they_are_behind(repository: CheckpointRepository, store: FileStore) -> None:
    for iteration in (1, 2):
        empty_manifest(store, save(repository, iteration))
    repository.newest_complete(condemn=True)
    save(repository, 3)
    assert repository.collect(retain=1, generation=1) == 2
    assert repository.iterations() == [3]
    assert repository.condemned() == {}


def test_only_what_replaced_generations_left_unfinished_is_collected(
    store: FileStore, repository: CheckpointRepository
) -> None:
    keys = [f"jobs/a/shards/i0000000009-g{generation}-all/r0.safetensors" for generation in (1, 2, 3)]
    for key in keys:
        path = Path(store.url.removeprefix("file://")) / key
        path.parent.mkdir(parents=True)
        path.with_name(f".{path.name}.{'0' * 32}.part").write_bytes(b"half")
    repository.collect(retain=1, generation=2)
    assert store.unfinished("") == keys
    repository.fence(2)
    repository.collect(retain=1, generation=2)
    assert store.unfinished("") == keys[1:]


def test_a_replaced_writer_collects_nothing(repository: CheckpointRepository) -> None:
    for iteration in (1, 2, 3):
        save(repository, iteration)
    repository.fence(2)
    assert repository.collect(retain=1, generation=1) == 0
    assert repository.iterations() == [3, 2, 1]


def test_a_fence_tells_what_counts(repository: CheckpointRepository) -> None:
    assert repository.fence(1) == ()
    first, second = save(repository, 1), save(repository, 2)
    assert repository.fence(2, up_to=1) == repository.fence(2) == (first.key,)
    third = save(repository, 3, generation=2)
    assert repository.fence(3) == (third.key, first.key)
    assert repository.newest_complete(repository.fence(3)) == (third, [])
    assert repository.newest_complete([second.key]) == (second, [])


def test_a_restart_that_comes_late_condemns_nothing_that_was_retired(repository: CheckpointRepository) -> None:
    """A step may be carried out twice: the second time when the generation has saved, and removed what was before."""
    save(repository, 1)
    repository.fence(2)
    later = save(repository, 2, generation=2)
    repository.collect(retain=1, generation=2)
    assert repository.newest_complete(repository.fence(2), condemn=True) == (later, [])
    assert repository.condemned() == {}


def test_what_is_no_manifest_is_left_alone(repository: CheckpointRepository, store: FileStore) -> None:
    first, second = save(repository, 1), save(repository, 2)
    store.put(f"{second.key}.bak", b"an operator's")
    empty_manifest(store, second)
    assert repository.newest_complete(condemn=True)[0] == first
    save(repository, 3)
    repository.collect(retain=1, generation=1)
    assert store.list("jobs/a/manifests/")[1:] == [f"{second.key}.bak"]


def test_who_is_second_to_write_a_fence_hears_what_the_first_one_said(store: FileStore) -> None:
    """Two carry out one step: a checkpoint that only the second has listed does not count."""
    repository = CheckpointRepository(store, "a")
    first = save(repository, 1)

    class Racing(FileStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if "/fences/" in key and "closing" not in key:
                store.put(key, b'{"generation": 2, "admitted": ["%s"]}' % first.key.encode())
            return super().put_if_absent(key, data)

    save(repository, 2)
    assert CheckpointRepository(Racing(Path(store.url.removeprefix("file://"))), "a").fence(2) == (first.key,)


def test_however_many_shards_there_are_they_cost_one_request(tmp_path: Path) -> None:
    class Counting(FileStore):
        asked = 0

        def size(self, key: str) -> int:
            pytest.fail(f"one request for {key}")

        def sizes(self, prefix: str) -> dict[str, int]:
            self.asked += 1
            return FileStore(tmp_path).sizes(prefix)

    store = Counting(tmp_path)
    repository = CheckpointRepository(store, "a")
    repository.commit(prepare(repository, 1, num_ranks=20))
    assert store.asked == 1
    assert newest(repository) == 1
    assert store.asked == 2
    repository.collect(retain=1, generation=1)
    assert store.asked == 3


def test_fences_are_idempotent_and_only_rise(repository: CheckpointRepository) -> None:
    repository.fence(3)
    save(repository, 1, generation=3)
    repository.fence(3)
    assert newest(repository) == 1
    with pytest.raises(StaleGeneration, match="generation 2 was replaced by 3"):
        repository.fence(2)


def test_retention_keeps_the_newest_complete_ones(repository: CheckpointRepository, store: FileStore) -> None:
    saved = [save(repository, iteration) for iteration in range(1, 6)]
    remove(store, saved[3])
    assert repository.collect(retain=2, generation=1) == 2
    manifests = [Path(key).name for key in store.list("jobs/a/manifests/")]
    assert manifests == [Path(m.key).name for m in (saved[4], saved[3], saved[2])]
    assert {key.split("/")[3] for key in store.list("jobs/a/shards/")} == {
        f"i000000000{iteration}-g1-all" for iteration in (3, 4, 5)
    }


def test_retention_never_touches_the_last_good_one(repository: CheckpointRepository, store: FileStore) -> None:
    good = save(repository, 1)
    for iteration in (2, 3):
        empty_manifest(store, save(repository, iteration))
    assert repository.collect(retain=1, generation=1) == 0
    manifest, skipped = repository.newest_complete()
    assert manifest == good
    assert len(skipped) == 2
    with pytest.raises(ValueError, match="retain is 0"):
        repository.collect(retain=0, generation=1)


def test_retention_of_an_old_writer_leaves_newer_generations_alone(repository: CheckpointRepository, store: FileStore) -> None:
    save(repository, 5, generation=1)
    newer = save(repository, 3, generation=2)
    repository.collect(retain=1, generation=1)
    assert store.get(newer.key)
    assert list(repository.load_shards(newer))


def test_a_save_in_progress_is_not_collected(repository: CheckpointRepository) -> None:
    save(repository, 1)
    save(repository, 2)
    in_progress = prepare(repository, 3)
    repository.collect(retain=1, generation=1)
    assert repository.commit(in_progress)
    assert newest(repository) == 3


def test_jobs_do_not_see_each_other(store: FileStore, repository: CheckpointRepository) -> None:
    manifest = save(repository, 1)
    other = CheckpointRepository(store, "b")
    assert other.newest_complete() == (None, [])
    with pytest.raises(CheckpointError, match="is no checkpoint of job b"):
        other.load_manifest(manifest.key)
