"""The state in host memory, beyond the process: a copy every few iterations, in one of two slots in turn.

Ranks that have the same of a state are equal after each iteration: one of them a node writes. Training waits for the copying
only; a thread compares and completes the slot. A node without memory for it costs one warning, never the training.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.checkpointing.slot_header import Place, SlotHeader
from unicron_lib.checkpointing.slots import IN_TURN, Claim, SlotPair
from unicron_lib.checkpointing.tensors import pack_into, packed_bytes
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError, SlotError, UserError
from unicron_lib.planning.cadence import SHARE
from unicron_lib.training.kept_parts import reading_parts
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica

log = logging.getLogger(__name__)
NICENESS = 10
"""Of what runs beside the training."""


@dataclass(slots=True, kw_only=True)
class Cadence:
    """When the next copy is due: every `interval` iterations, or, where that is None, as often as takes `SHARE` of the time."""

    interval: int | None
    iteration: int | None = None
    ended: float = 0.0
    took_s: float = 0.0

    def is_due(self, iteration: int, now: float) -> bool:
        """Whether the state after `iteration` is to be copied, at `now` (monotonic)."""
        if self.interval is not None and (self.interval == 0 or (iteration + 1) % self.interval):
            return False
        if self.iteration is None or self.interval is not None:
            return True
        return now - self.ended >= self.took_s * (1 / SHARE - 1)

    def note(self, iteration: int, began: float, ended: float) -> None:
        """A copy was made."""
        self.iteration, self.ended, self.took_s = iteration, ended, ended - began


class Snapshots:
    """The slots of a job on this node, as one of its ranks sees them; a pair of None means that there are none.

    What is put into the one that is `travelling` too, the agent copies to another node.
    """

    def __init__(self, pair: SlotPair | None, spec: JobSpec, *, travelling: SlotPair | None = None) -> None:
        self._pair = pair
        self._travelling = travelling
        self._part = pair.part if pair is not None else ""
        self._spec = spec
        self._cadence = Cadence(interval=spec.memory_interval)
        self._thread: threading.Thread | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # what is registered stays mapped, or another one might get its address

    @property
    def is_busy(self) -> bool:
        """Whether the last copy is not complete yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_off(self) -> bool:
        """Whether nothing can be kept here: there was no memory for it."""
        return self._pair is None

    def is_due(self, iteration: int) -> bool:
        """Whether the state after `iteration` is to be kept now: not before the last copy is complete."""
        return self._pair is not None and not self.is_busy and self._cadence.is_due(iteration, time.monotonic())

    def may_travel(self, generation: int) -> bool:
        """Whether no copy of `generation` waits for its journey any more."""
        if self._travelling is None or self._travelling.has_travelled:
            return True
        return all(it.generation < generation for it in self._travelling.found())

    def keep(self, position: Position, state: Mapping[str, torch.Tensor], *, travels: bool = False) -> bool:
        """Copy the state, also for another node if it `travels`; whether there was room for it, and a slot was free."""
        size = packed_bytes(state)
        claim = self._claim(size)
        if claim is not None:  # what travels has other memory each time
            self._pin(claim, next(iter(state.values())).device)
        whole = [it for it in (claim, self._claim_to_travel(size) if travels else None) if it is not None]
        copying = time.monotonic()  # memory that is taken for the first time does not come again
        for it in whole:
            pack_into(state, it.data)
        if whole:
            self._cadence.note(position.iteration, copying, time.monotonic())
            place = (position.generation, position.iteration)
            self._thread = threading.Thread(target=self._complete, args=(whole, place, position.loss), name="slot", daemon=True)
            self._thread.start()
        return bool(whole)

    def _claim(self, size: int) -> Claim | None:
        try:
            return self._pair.claim(size) if self._pair is not None else None
        except SlotError as error:
            log.warning("%s; the training goes on without", error)
            self._pair = None
            return None

    def _claim_to_travel(self, size: int) -> Claim | None:
        """Only when all parts of the last iteration have travelled may one of these be the next."""
        if self._travelling is None:
            return None
        try:
            self._travelling.put_aside()
            return self._travelling.claim(size)
        except (SlotError, OSError) as error:
            log.warning("%s; what goes to another node is left out", error)
            self._travelling = None
            return None

    def settle(self) -> None:
        """Wait until the last copy is complete."""
        if self._thread is not None:
            self._thread.join()

    def _complete(self, claims: Sequence[Claim], place: Place, loss: float) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        digest = digest_of(claims[0].data)
        header = SlotHeader(
            job=self._spec.job,
            generation=place[0],
            iteration=place[1],
            consumed_samples=(place[1] + 1) * self._spec.global_batch_size,
            loss=loss,
            num_bytes=len(claims[0].data),
            digest=digest,
            part=self._part,
        )
        for claim in claims:
            claim.commit(header)

    def _pin(self, claim: Claim, device: torch.device) -> None:
        """Let the GPU write into a slot directly; where that is refused, the copies merely take longer."""
        memory = torch.frombuffer(claim.data, dtype=torch.uint8)
        if device.type != "cuda" or memory.data_ptr() in self._pinned:
            return
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if len(self._pinned) == len(IN_TURN):  # one of their files has been replaced
            for address in self._pinned:
                cuda.cudaHostUnregister(address)
            self._pinned.clear()
        self._pinned[memory.data_ptr()] = memory
        refusal = cuda.cudaHostRegister(memory.data_ptr(), len(claim.data), 0)
        if int(refusal):
            log.warning("a slot is not pinned: CUDA says %s", refusal)

    def restore(self, place: Place, replica: Replica, position: Position, *, kept_in: Layout | None = None) -> bool:
        """Fill `replica` from slots of that place, which its agent has compared; whether it could.

        It is one slot, unless the state was `kept_in` another layout.
        """
        if self._pair is None:
            return False
        started, own, wanted = time.monotonic(), replica.siblings.layout, replica.slices
        reading = partial(reading_parts, self._pair.directory, place, self._part, spec=self._spec, wanted=wanted)
        try:
            with reading(kept_in=kept_in or own) as (header, state):
                position.is_whole = False
                replica.load(state)
        except (SlotError, CheckpointError, UserError) as error:
            log.warning("the state is not taken from memory: %s", error)
            return False
        position.advance(place[1], generation=place[0], loss=header.loss, grad_norm=None)
        position.is_whole = True
        elapsed = time.monotonic() - started
        log.info("restored iteration %d, %d bytes, from memory in %.3f s", place[1], header.num_bytes, elapsed)
        return True
