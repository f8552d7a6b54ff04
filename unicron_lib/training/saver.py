"""Saving a checkpoint while training goes on: each rank its share, rank 0 commits when all shares are there."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from unicron_lib.checkpointing.manifest import Manifest, Shard, format_of
from unicron_lib.checkpointing.model_state import of_the_state, owned_at, slices_at
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import CheckpointError, StaleGeneration, StoreError
from unicron_lib.planning.cadence import UNMEASURED_S, pause_s
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.position import Position
from unicron_lib.training.shards import own_share, to_bytes

log = logging.getLogger(__name__)
SHARDS_DEADLINE_S = 60.0
"""How long rank 0 waits for the other ranks' shards before it gives the save up."""
POLL_S = 0.02
"""How often who waits for a save looks whether it is to wait no more."""
REACH = 2
"""Checkpoints are kept so many times the patience with a spike back: it takes a while until the ranks are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What one save of this rank uploads: a copy of its share of the state at a position."""

    iteration: int
    loss: float
    data: bytearray
    names: tuple[str, ...]
    blocking_s: float = 0.0
    began: float = field(default_factory=time.monotonic)


def reach_of(spec: JobSpec, iteration: int, *, doubted_from: int | None = None) -> int | None:
    """The iteration from which, or from before which, a checkpoint must be left when one of `iteration` is there; None: any.

    A spike of the loss, or a wrong result, is in checkpoints already when it is found out. One is also left from before a spike
    that began with `doubted_from` until that is decided, however long that takes.
    """
    back = max(REACH * spec.loss_spike_patience_iters if spec.loss_guard else 0, spec.rerun_check_interval)
    usual = iteration - back if back else None
    if doubted_from is None:
        return usual
    return min(doubted_from - 1, iteration if usual is None else usual)


class Saver:
    """At most one save is in flight. A store that is down costs warnings and the checkpoint's age, never the training.

    `pause_s` is how long it pays to wait for the next one. `doubted_from` is where a spike of the loss began that may still
    call for going back, as the rank sees it.
    """

    def __init__(self, repository: CheckpointRepository, env: RankEnvironment) -> None:
        self._repository = repository
        self._env = env
        self._thread: threading.Thread | None = None
        self._memory: bytearray | None = None
        self._is_saved = False
        self._given_up = threading.Event()
        self._committed_at = time.monotonic()
        self.committed: str | None = env.restore_from
        self.is_stale = False
        self.doubted_from: int | None = None
        self.pause_s = UNMEASURED_S

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, position: Position, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's share now and upload it in the background."""
        if self.is_busy:
            log.warning("iteration %d is not saved: the previous save is still in flight", position.iteration)
            return
        self._start(self._copy(position, state))

    def save_now(self, position: Position, state: Mapping[str, torch.Tensor], poll: Callable[[], None] = lambda: None) -> bool:
        """Upload this rank's share of the state, and on rank 0 commit; False if that failed. Waits for a save in flight.

        `poll` is called again and again meanwhile, and may raise: the save then goes on in the background.
        """
        self._await(poll)
        self._start(self._copy(position, state))
        self._await(poll)
        return self._is_saved

    def give_up(self) -> None:
        """Wait no more for other ranks' shards: who has not written its own yet will not."""
        self._given_up.set()

    def save_replica(self, position: Position, state: Mapping[str, torch.Tensor]) -> str | None:
        """Save this rank's state without waiting for anybody, and commit what then is a whole replica's; None if it failed.

        Returns the manifest's key, "" from a rank that has saved its part of a replica. The rank at the first place commits: it
        is to come last.
        """
        mine = self._owned(state)
        copy = Copy(iteration=position.iteration, loss=position.loss, data=to_bytes(mine), names=tuple(mine))
        # states of one iteration that different generations have applied are not of one replica
        save = "replica-{}".format(self._env.rank if self._is_alone else f"of-{position.generation}")
        try:
            self._put(copy, save=save, rank=self._env.rank % self._env.layout.replica_size)
            return self._commit_replica(copy, save) if self._is_first else ""
        except (StoreError, CheckpointError, StaleGeneration) as error:
            log.warning("the replica of iteration %d is not saved: %s", position.iteration, error)
            return None

    @property
    def _is_alone(self) -> bool:
        return self._env.layout.replica_size == 1

    @property
    def _is_first(self) -> bool:
        return self._env.rank % self._env.layout.replica_size == 0

    def _commit_replica(self, copy: Copy, save: str) -> str:
        shards = self._repository.find_shards(
            iteration=copy.iteration,
            generation=self._env.generation,
            save=save,
            num_ranks=self._env.layout.replica_size,
        )
        if shards is None:
            raise CheckpointError("not all of its ranks have written their parts")
        return self._repository.commit(self._manifest(copy, shards))

    def _start(self, copy: Copy) -> None:
        self._thread = threading.Thread(target=self._save, args=(copy,), name="save", daemon=True)
        self._thread.start()

    def _await(self, poll: Callable[[], None]) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL_S)
            poll()

    def _copy(self, position: Position, state: Mapping[str, torch.Tensor]) -> Copy:
        began = time.monotonic()
        mine = own_share(self._owned(state), rank=self._env.place.dp, world_size=self._env.layout.dp)
        # no save is in flight now, so nobody reads the last one's memory any more
        data = self._memory = to_bytes(mine, self._memory)
        return Copy(
            iteration=position.iteration,
            loss=position.loss,
            data=data,
            names=tuple(mine),
            blocking_s=time.monotonic() - began,
            began=began,
        )

    def _owned(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What of the state is saved by ranks of this place, and by no others of the replica."""
        if self._is_alone:
            return state
        owned = owned_at(self._env.spec, self._env.layout, self._env.place)
        return {name: tensor for name, tensor in state.items() if name.partition(".")[2] in owned}

    def _slices(self, names: tuple[str, ...]) -> dict[str, TensorSlice]:
        """Where these tensors lie in the whole ones, nothing if they are whole."""
        if self._is_alone:
            return {}
        here = of_the_state(slices_at(self._env.spec, self._env.layout, self._env.place))
        return {name: here[name] for name in names}

    def _save(self, copy: Copy) -> None:
        started = time.monotonic()
        self._is_saved = False
        try:
            self._put(copy, save="all", rank=self._env.rank)
            if self._env.rank == 0:
                self._commit(copy)
        except StaleGeneration as error:
            self.is_stale = True
            log.error("%s", error)  # noqa: TRY400 - one sentence says it all
        except (StoreError, CheckpointError) as error:
            age = time.monotonic() - self._committed_at
            log.warning("iteration %d is not saved, the newest checkpoint is %.0f s old: %s", copy.iteration, age, error)
        else:
            log.info("iteration %d saved in %.3f s", copy.iteration, time.monotonic() - started)
            self._is_saved = True

    def _put(self, copy: Copy, *, save: str, rank: int) -> Shard:
        return self._repository.put_shard(
            iteration=copy.iteration,
            generation=self._env.generation,
            save=save,
            rank=rank,
            data=copy.data,
            tensors=copy.names,
            slices=self._slices(copy.names),
        )

    def _commit(self, copy: Copy) -> None:
        manifest = self._manifest(copy, self._gather(copy.iteration))
        self.committed = self._repository.commit(manifest)
        self.pause_s = pause_s(blocking_s=manifest.blocking_s, upload_s=manifest.upload_s, mtbf_s=self._env.mtbf_s)
        self._committed_at = time.monotonic()
        spec = self._env.spec
        reach = reach_of(spec, copy.iteration, doubted_from=self.doubted_from)
        self._repository.collect(retain=spec.save_retain, generation=self._env.generation, reach=reach)

    def _gather(self, iteration: int) -> tuple[Shard, ...]:
        """Wait until all ranks' shards are there."""
        deadline = time.monotonic() + SHARDS_DEADLINE_S
        pause_s = 0.02
        while time.monotonic() < deadline and not self._given_up.is_set():
            shards = self._repository.find_shards(
                iteration=iteration, generation=self._env.generation, save="all", num_ranks=self._env.world_size
            )
            if shards is not None:
                return shards
            self._given_up.wait(pause_s)
            pause_s = min(0.5, 1.5 * pause_s)
        if self._given_up.is_set():
            raise CheckpointError("not all ranks wrote their shards before the generation ended")
        raise CheckpointError(f"not all ranks wrote their shards within {SHARDS_DEADLINE_S:.0f} s")

    def _manifest(self, copy: Copy, shards: tuple[Shard, ...]) -> Manifest:
        return Manifest(
            job=self._env.job,
            generation=self._env.generation,
            iteration=copy.iteration,
            loss=copy.loss,
            consumed_samples=(copy.iteration + 1) * self._env.spec.global_batch_size,
            layout=self._env.layout,
            shards=shards,
            format=format_of(shards),
            committed_at=time.time(),
            blocking_s=copy.blocking_s,
            upload_s=time.monotonic() - copy.began - copy.blocking_s,
        )
