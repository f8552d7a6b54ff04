"""A rank's time in one generation: it meets the others, takes over or hands over the state, trains, and saves at the end."""

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import torch

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import RankDrained, RankFinished
from unicron_lib.checkpointing.manifest import Manifest, parse_key
from unicron_lib.checkpointing.model_state import of_the_state, slices_at, why_unloadable
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.sections import Section
from unicron_lib.errors import CheckpointError, StaleGeneration, UserError
from unicron_lib.training import groups
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.groups import Bulletin, Meeting
from unicron_lib.training.handover import Fallback, Memory, hand_over
from unicron_lib.training.keeping import begin_from_slot, keep_the_last
from unicron_lib.training.ledger import Ledger, ledger_directory
from unicron_lib.training.life import State
from unicron_lib.training.link import AgentLink
from unicron_lib.training.loop import Loop, Work
from unicron_lib.training.peers import CollectiveFailed, Parked, Peers
from unicron_lib.training.saver import Saver
from unicron_lib.training.shards import read_slices

log = logging.getLogger(__name__)
COMMIT_DEADLINE_S = 90.0
"""How long a drained rank waits for rank 0's commit: longer than rank 0 waits for the others' shards."""
RETRY_S = 2.0
"""Pause between attempts to save the last checkpoint: a finished job waits for its store."""
POLL_S = 0.02
_DRAIN, _PARK = b"drain", b"park"
_store_at = cache(open_store)
"""A process that lives on keeps its connections."""


class Term:
    """One generation of one rank. Raises UserError for a job that cannot run here."""

    def __init__(self, env: RankEnvironment, link: AgentLink, beats: BeatWriter) -> None:
        self._env = env
        self._link = link
        self._beats = beats
        self._repository = CheckpointRepository(_store_at(env.store_url), env.job)
        self._saver = Saver(self._repository, env)
        self._work = Work(env.spec, replica=env.place.dp, num_replicas=env.layout.dp, skipped=env.skipped)
        self._fallback_iteration, self._fallback_generation = (
            parse_key(env.job, env.restore_from) if env.restore_from else (-1, -1)
        )

    def run(self, memory: Memory) -> None:
        """Train with `memory` until the job has finished, or was drained, and say so.

        Raises Parked when the rank is to wait with what it has, CollectiveFailed when a peer is lost: `memory` counts then.
        After any other exception it is worth nothing.
        """
        env = self._env
        with self._drains_answered(memory):
            begin_from_slot(memory, env, fallback_iteration=self._fallback_iteration)
            meeting = groups.join(env, memory.replica.device, is_given_up=lambda: self._link.wants_park)
            origin = hand_over(
                meeting.peers,
                memory,
                node=env.node,
                generation=env.generation,
                num_micro_batches=env.spec.num_micro_batches,
                fallback=self._fallback(memory),
            )
        self._link.enter(State.TRAINING)
        loop = Loop(
            env,
            memory=memory,
            meeting=meeting,
            work=self._work,
            saver=self._saver,
            link=self._link,
            beats=self._beats,
            origin=origin,
        )
        directory = ledger_directory(env.run_dir, env.job)
        siblings = memory.replica.siblings.met(line=meeting.line, replica=meeting.replica)
        with siblings, Ledger(directory, generation=env.generation, rank=env.rank, skipped=env.skipped) as ledger:
            is_finished = loop.run(ledger)
        if not is_finished and not self._is_drained(meeting.peers):
            raise Parked(f"all ranks park after iteration {memory.position.iteration}")
        self._end(memory, meeting, is_finished=is_finished)

    def save_replica(self, memory: Memory | None, *, writes_as: str | None = None) -> RankDrained:
        """Save the state, unless it still is the one of the fallback; tells the manifest, "" if this is a part of a replica.

        `writes_as` is the generation that does so, if this rank's own has been replaced already.
        """
        if memory is None or not memory.position.is_whole or memory.position.iteration <= self._fallback_iteration:
            return self._drained(self._fallback_iteration, self._env.restore_from)
        saver = self._saver
        if writes_as is not None:
            saver = Saver(self._repository, replace(self._env, generation=int(writes_as)))
        manifest = saver.save_replica(memory.position, memory.replica.state())
        keep_the_last(memory)
        return self._drained(memory.position.iteration, manifest)

    def close(self) -> None:
        """The rank goes on in another generation: nobody waits for this one any more."""
        self._saver.give_up()

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _drains_answered(self, memory: Memory) -> AbstractContextManager[None]:
        """Until it has a state of its own, a rank has nothing to save, and answers with what it was given."""
        if memory.position.is_whole:
            return nullcontext()
        return self._link.drains_answered_with(self._drained(self._fallback_iteration, self._env.restore_from))

    def _fallback(self, memory: Memory) -> Fallback:
        def load() -> float:
            manifest, state = self._fetch()
            memory.replica.load(state)
            return manifest.loss

        return Fallback(
            iteration=self._fallback_iteration,
            name=self._env.restore_from or "",
            load=load,
            generation=self._fallback_generation,
        )

    def _fetch(self) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """The fallback's state, read in a thread of its own: who is to park does not wait for the store."""
        read: Future[tuple[Manifest, dict[str, torch.Tensor]]] = Future()

        def run() -> None:
            try:
                read.set_result(self._read_fallback())
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                read.set_exception(error)

        threading.Thread(target=run, name="restore", daemon=True).start()
        while not read.done():
            self._poll()
            self._link.rest(POLL_S)
        return read.result()

    def _read_fallback(self) -> tuple[Manifest, dict[str, torch.Tensor]]:
        assert self._env.restore_from is not None
        started = time.monotonic()
        manifest = self._repository.load_manifest(self._env.restore_from)
        if reason := why_unloadable(manifest, self._env.spec):
            raise UserError(f"the checkpoint cannot be loaded, {reason}: give the job another name, or leave `load` out")
        wanted = of_the_state(slices_at(self._env.spec, self._env.layout, self._env.place))
        try:
            state = read_slices(self._repository, manifest, wanted)
        except CheckpointError as error:
            self._repository.condemn(manifest.key, str(error))
            raise
        elapsed = time.monotonic() - started
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        log.info("restored iteration %d, %d of %d bytes, in %.3f s", manifest.iteration, num_bytes, manifest.num_bytes, elapsed)
        return manifest, state

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _is_drained(self, peers: Peers) -> bool:
        """Whether any rank was told to drain: all have stopped, but not all need have been told why."""
        return _DRAIN in peers.exchange(_DRAIN if self._link.is_draining else _PARK)

    def _end(self, memory: Memory, meeting: Meeting, *, is_finished: bool) -> None:
        """Save the last state together with the other ranks and say so."""
        env, iteration = self._env, memory.position.iteration
        manifest = env.restore_from
        self._link.enter(State.DRAINING)
        self._beats.mark(Section.CHECKPOINT)
        if iteration > self._fallback_iteration:
            manifest = self._save_together(memory, meeting.bulletin, must_succeed=is_finished)
        if is_finished:
            loss = memory.position.loss
            self._link.finish(
                RankFinished(job=env.job, generation=env.generation, rank=env.rank, iteration=iteration, loss=loss)
            )
        else:
            if env.keeps and manifest is not None and iteration > self._fallback_iteration:
                keep_the_last(memory)
            self._link.finish(self._drained(iteration, manifest))

    def _save_together(self, memory: Memory, bulletin: Bulletin, *, must_succeed: bool) -> str | None:
        """Upload this rank's share; rank 0 commits and tells the others the manifest's key, None if it failed."""
        iteration = memory.position.iteration
        is_saved = self._saver.save_now(memory.position, memory.replica.state(), self._poll)
        while must_succeed and not is_saved and not self._saver.is_stale:
            self._refuse_to_wait_in_a_drain(iteration)
            self._link.rest(RETRY_S)
            is_saved = self._saver.save_now(memory.position, memory.replica.state(), self._poll)
        if self._env.rank == 0:
            bulletin.post(f"commit/{iteration}", (self._saver.committed or "") if is_saved else "")
            key = self._saver.committed if is_saved else None
        else:
            key = self._await_commit(bulletin, iteration, must_succeed=must_succeed)
        if must_succeed and key is None:
            raise StaleGeneration(f"generation {self._env.generation} of job {self._env.job} was replaced before its last save")
        return key

    def _await_commit(self, bulletin: Bulletin, iteration: int, *, must_succeed: bool) -> str | None:
        deadline = time.monotonic() + COMMIT_DEADLINE_S
        while must_succeed or time.monotonic() < deadline:
            key = bulletin.read(f"commit/{iteration}", timeout_s=1.0)
            if key is not None:
                return key or None
            self._poll()
            if must_succeed:
                self._refuse_to_wait_in_a_drain(iteration)
        return None

    def _refuse_to_wait_in_a_drain(self, iteration: int) -> None:
        """A drain while the last checkpoint is not committed: rank 0 or the store is gone, and our replica is what counts."""
        if self._link.is_draining:
            raise CollectiveFailed("StoreError", f"iteration {iteration}, the last one, could not be saved yet")

    def _poll(self) -> None:
        """A sign of life, and a look whether to park."""
        if self._link.wants_park:
            raise Parked("the rank was told to park")
        self._beats.mark()

    def _drained(self, iteration: int, manifest: str | None) -> RankDrained:
        env = self._env
        return RankDrained(job=env.job, generation=env.generation, rank=env.rank, iteration=iteration, manifest=manifest)
