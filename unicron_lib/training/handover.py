"""How the ranks of a new generation come to one state: from each other's memories, or from the fallback checkpoint.

What is handed over is the parameters, the moments, and what is final of the iteration under way. All else follows from the
iteration: the samples, their order, the learning rate, the number of the optimizer's step, and what is random.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from unicron_lib.training.agreement import Agreement, Standing, agree
from unicron_lib.training.doubt import Doubt
from unicron_lib.training.effort import NONE, Effort
from unicron_lib.training.peers import Peers
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica
from unicron_lib.training.snapshots import Snapshots
from unicron_lib.training.transfer import receive_checked, send_checked

log = logging.getLogger(__name__)
_standing: TypeAdapter[Standing] = TypeAdapter(Standing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The checkpoint that every rank of the generation was given.

    `iteration` is its last complete one, -1 for a fresh start; `name` is its manifest's key, "" for a fresh start. `load`
    loads it into the rank's replica and returns its loss: it is called only if the ranks agree to begin there, and not for a
    fresh start. `generation` wrote it, -1 for a fresh start.
    """

    iteration: int
    name: str
    load: Callable[[], float]
    generation: int = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a rank came into its generation, as `Progress` tells it."""

    source: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    kept_micro_batches: int = 0
    recomputed_micro_batches: int = 0
    discarded_micro_batches: int = 0


@dataclass(slots=True, kw_only=True)
class Memory:
    """What a rank's process keeps from generation to generation; the next save is due as if `saved` had been the last one.

    That was `saved_at` (monotonic), or the process began then.
    `came_from` tells where a state is from that this process has not computed. With `is_recheck_off` the job's kernels are
    known not to be deterministic. `was_in` is the last generation into which the rank came, -1 for none. So many complete
    micro-batches it has `given_up` for a state from elsewhere since an iteration's end has told of them.
    """

    replica: Replica
    effort: Effort = field(default_factory=Effort)
    position: Position = field(default_factory=Position)
    saved: int = -1
    saved_at: float = field(default_factory=time.monotonic)
    snapshots: Snapshots | None = None
    came_from: str = ""
    is_recheck_off: bool = False
    doubt: Doubt = field(default_factory=Doubt)
    was_in: int = NONE
    given_up: int = 0

    @property
    def account(self) -> dict[str, Any]:
        """What a memory in another layout takes over: nothing that is of use there, only what it is to tell of."""
        done = Effort(iteration=self.effort.iteration, done=self.effort.done)
        return {"effort": done, "was_in": self.was_in, "given_up": self.given_up}


def hand_over(
    peers: Peers, memory: Memory, *, node: str, generation: int, num_micro_batches: int, fallback: Fallback
) -> Origin:
    """Bring this rank to where the generation begins; `memory.effort` then says what is left of the iteration under way.

    Call it once all ranks have met. Raises CollectiveFailed when a peer is lost meanwhile: what this rank had whole before,
    it still has. Raises CopyDamaged when a copy arrived damaged, and what `fallback.load` raises.
    """
    own = _standing.dump_json(_standing_of(memory, rank=peers.rank, node=node))
    replica_size = memory.replica.siblings.layout.replica_size
    agreed = agree(
        [_standing.validate_json(told) for told in peers.exchange(own)],
        num_micro_batches=num_micro_batches,
        num_buckets=len(memory.replica.buckets),
        fallback_iteration=fallback.iteration,
        fallback_generation=fallback.generation,
        replica_size=replica_size,
        column=peers.rank % replica_size,
    )
    _complete(memory, agreed.steps.get(peers.rank))
    memory.saved = fallback.iteration
    started = time.monotonic()
    if agreed.loads_fallback:
        _give_up(memory, agreed.discards[peers.rank])
        _load(memory, fallback, generation)
        copied_bytes = 0
    else:
        copied_bytes = _copy_state(peers, memory, agreed) + _resume(peers, memory, agreed)
    origin = Origin(
        source=_source(agreed, peers.rank, memory, fallback),
        copied_bytes=copied_bytes,
        copy_s=time.monotonic() - started if copied_bytes else 0.0,
        kept_micro_batches=len(agreed.keeps[peers.rank]),
        recomputed_micro_batches=len(agreed.in_place_of_lost[peers.rank]),
        discarded_micro_batches=memory.given_up,
    )
    memory.came_from, memory.was_in = "", generation
    log.info("rank %d goes on after iteration %d: %s", peers.rank, memory.position.iteration, origin)
    return origin


def _standing_of(memory: Memory, *, rank: int, node: str) -> Standing:
    position, effort = memory.position, memory.effort
    return Standing(
        rank=rank,
        node=node,
        has_state=position.is_whole,
        iteration=position.iteration,
        lineage=position.generation,
        loss=position.loss,
        under_way=effort.iteration,
        share=frozenset(effort.share),
        done=frozenset(effort.done),
        reduced=dict(effort.reduced),
        grad_norm=position.grad_norm,
        prepared_in=effort.prepared_in,
        was_in=memory.was_in,
    )


def _complete(memory: Memory, ahead: Standing | None) -> None:
    """Step as a sibling has that heard what this rank has missed; otherwise what is said at the end is to be said again."""
    memory.effort.prepared_in = NONE
    if ahead is None or ahead.grad_norm is None:
        return
    memory.replica.learn(loss=ahead.loss, norm=ahead.grad_norm)
    norm = memory.replica.step(ahead.iteration)
    memory.position.advance(ahead.iteration, generation=ahead.lineage, loss=ahead.loss, grad_norm=norm)
    memory.effort.clear()


def _source(agreed: Agreement, rank: int, memory: Memory, fallback: Fallback) -> str:
    if agreed.loads_fallback:
        return fallback.name
    source = agreed.source_of[rank]
    return memory.came_from or "own memory" if source is None else f"rank {source}"


def _give_up(memory: Memory, discards: frozenset[int]) -> None:
    """Forget what was done of the iteration under way; `discards` of it are in no state."""
    memory.given_up += len(memory.effort.done & discards)
    memory.effort.clear()


def _load(memory: Memory, fallback: Fallback, generation: int) -> None:
    position = memory.position
    position.is_whole = False
    if fallback.iteration < 0:
        memory.replica.initialize()
        position.loss = 0.0
    else:
        position.loss = fallback.load()
    position.advance(fallback.iteration, generation=generation, loss=position.loss, grad_norm=None)
    position.is_whole = True


def _copy_state(peers: Peers, memory: Memory, agreed: Agreement) -> int:
    """Send and receive whole states; returns the bytes received. All walk through the copies in the same order."""
    received = 0
    for rank, source in sorted(agreed.source_of.items()):
        if source == peers.rank:
            with memory.replica.filling() as flats:
                send_checked(peers, flats, rank)
        elif source is not None and rank == peers.rank:
            memory.position.is_whole = False
            _give_up(memory, agreed.discards[rank])
            with memory.replica.filling() as flats:
                received = receive_checked(peers, flats, source)
            position = memory.position
            position.advance(agreed.iteration, generation=agreed.lineage, loss=agreed.loss, grad_norm=agreed.grad_norm)
            position.is_whole = True
    return received


def _resume(peers: Peers, memory: Memory, agreed: Agreement) -> int:
    """Take up the iteration under way, if there is one; returns the bytes received."""
    replica, effort, discards = memory.replica, memory.effort, agreed.discards[peers.rank]
    if not agreed.is_resumed:
        _give_up(memory, discards)
        return 0
    if effort.iteration != agreed.iteration + 1:
        _give_up(memory, discards)
        replica.begin()
        effort.begin(agreed.iteration + 1, ())
    elif effort.done != agreed.keeps[peers.rank]:
        memory.given_up += len(effort.done & discards)
        replica.clear_buckets(but=effort.reduced)
        effort.done = set()
    received = sum(_share_bucket(peers, memory, agreed, number) for number in sorted(agreed.reduced))
    effort.todo, effort.is_resumed = list(agreed.todo[peers.rank]), True
    return received


def _share_bucket(peers: Peers, memory: Memory, agreed: Agreement, number: int) -> int:
    """Send a final bucket to those who lack it, or receive it; a copy that breaks off leaves the bucket as it was."""
    giver, bucket = agreed.bucket_from[number], memory.replica.buckets[number]
    received = 0
    for rank in agreed.lacks[number]:
        if giver == peers.rank:
            send_checked(peers, [bucket], rank)
        elif rank == peers.rank:
            arriving = memory.replica.spare[: len(bucket)]
            received = receive_checked(peers, [arriving], giver)
            bucket.copy_(arriving)
            memory.effort.reduced[number] = agreed.reduced[number]
    return received
