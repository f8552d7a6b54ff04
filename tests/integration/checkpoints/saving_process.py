"""A process that saves one checkpoint after the other, as fast as it can, and says on a pipe what it has committed."""

import os

from unicron_lib.adapters.stores import open_store
from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.plans import Layout

NUM_RANKS = 2
RETAIN = 2


def content(iteration: int, generation: int, rank: int, num_bytes: int) -> bytes:
    """What a rank saves: every byte of it tells whose it is."""
    told = f"{iteration}/{generation}/{rank};".encode()
    return (told * (num_bytes // len(told) + 1))[:num_bytes]


def save_for_ever(url: str, generation: int, num_bytes: int, pipe: int) -> None:
    """Fence older generations off, go on from the newest checkpoint, and save until killed."""
    repository = CheckpointRepository(open_store(url), "killed")
    repository.fence(generation)
    newest, _ = repository.newest_complete(condemn=True)
    iteration = newest.iteration if newest else -1
    os.write(pipe, f"began {iteration}\n".encode())
    while True:
        iteration += 1
        save(repository, iteration, generation, num_bytes)
        os.write(pipe, f"saved {iteration}\n".encode())
        repository.collect(retain=RETAIN, generation=generation)


def save(repository: CheckpointRepository, iteration: int, generation: int, num_bytes: int) -> None:
    """All ranks' shards, then the manifest."""
    shards = tuple(
        repository.put_shard(
            iteration=iteration,
            generation=generation,
            save="all",
            rank=rank,
            data=content(iteration, generation, rank, num_bytes),
            tensors=(f"param.{rank}",),
        )
        for rank in range(NUM_RANKS)
    )
    manifest = Manifest(
        job="killed",
        generation=generation,
        iteration=iteration,
        loss=1.0,
        consumed_samples=8,
        layout=Layout(dp=NUM_RANKS),
        shards=shards,
    )
    repository.commit(manifest)
