"""What checkpoints a job has, which of them a restart would take, and why not the others."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from unicron_lib.checkpointing.manifest import Manifest, parse_key
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import CheckpointError

JOB = re.compile(r"jobs/([^/]+)/(?:manifests|shards)/")


class State(StrEnum):
    """What a checkpoint is good for. NEWEST is the one that a restart takes."""

    NEWEST = "newest"
    COMPLETE = "complete"
    CONDEMNED = "condemned"
    INCOMPLETE = "incomplete"
    FENCED_OFF = "fenced off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One checkpoint; `manifest` is None where there is none that can be read."""

    job: str
    iteration: int
    generation: int
    state: State
    reason: str = ""
    manifest: Manifest | None = None


def jobs_of(store: ObjectStore) -> list[str]:
    """Names of the jobs that have saved something."""
    return sorted({match[1] for key in store.list("jobs/") if (match := JOB.match(key))})


def survey(repository: CheckpointRepository, job: str) -> list[Found]:
    """All checkpoints and what looks like the beginning of one, newest first; reads manifests, but no shards."""
    counting, condemned = set(repository.manifest_keys()), repository.condemned()
    found: list[Found] = []
    for key in repository.all_manifest_keys():
        try:
            iteration, generation = parse_key(job, key)
        except CheckpointError:
            continue
        manifest, reason = repository.look_at(key)
        is_newest = (
            key in counting and key not in condemned and not reason and not any(it.state == State.NEWEST for it in found)
        )
        state, told = _judged(key, counting, condemned, reason)
        found.append(
            Found(
                job=job,
                iteration=iteration,
                generation=generation,
                state=State.NEWEST if is_newest else state,
                reason=told,
                manifest=manifest,
            )
        )
    begun = repository.saves() - {(it.iteration, it.generation) for it in found}
    found += [_begun(job, iteration, generation) for iteration, generation in begun]
    return sorted(found, key=lambda it: (-it.iteration, -it.generation))


def _judged(key: str, counting: set[str], condemned: dict[str, str], reason: str) -> tuple[State, str]:
    if key not in counting:
        return State.FENCED_OFF, "its generation had been replaced, or the job went back to before it"
    if key in condemned:
        return State.CONDEMNED, condemned[key]
    return (State.INCOMPLETE, reason) if reason else (State.COMPLETE, "")


def _begun(job: str, iteration: int, generation: int) -> Found:
    told = "it has no manifest: it is being saved, or its writer died"
    return Found(job=job, iteration=iteration, generation=generation, state=State.INCOMPLETE, reason=told)


def verify(repository: CheckpointRepository, found: Found, arrived: Callable[[int], None]) -> str:
    """Download all shards and check their digests, one shard in memory; why the checkpoint is damaged, or nothing.

    `arrived` is told how many bytes of it are there. Raises StoreError when the store fails.
    """
    if found.manifest is None:
        return found.reason
    try:
        for _ in repository.load_shards(found.manifest, arrived=arrived):
            pass
    except CheckpointError as error:
        return str(error)
    return ""
