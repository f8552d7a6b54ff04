"""A rank's life: hello, restore, train; then finish, drain, or park with the state in memory until it is fetched."""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from typing import assert_never

import torch

# imported here so that ranks, forked from a process that has imported this module, need not
import unicron_lib.adapters.s3  # noqa: F401
from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.error_file import leave_error
from unicron_lib.agent.rank_messages import RankDrained, RankFailed, RankFinished, RankHello
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.detection.sections import Section
from unicron_lib.errors import CheckpointError, StaleGeneration
from unicron_lib.training import groups
from unicron_lib.training.environment import RankEnvironment, read_environment
from unicron_lib.training.groups import Bulletin, CollectiveFailed
from unicron_lib.training.last_words import end_with_threads, last_words
from unicron_lib.training.ledger import Ledger, ledger_directory
from unicron_lib.training.link import AgentLink
from unicron_lib.training.loop import Loop, Work
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica
from unicron_lib.training.saver import Saver
from unicron_lib.training.shards import read_state

log = logging.getLogger(__name__)
TERMINATED = 143
COMMIT_DEADLINE_S = 90.0
"""How long a drained rank waits for rank 0's commit: longer than rank 0 waits for the others' shards."""
RETRY_S = 2.0
"""Pause between attempts to save the last checkpoint: a finished job waits for its store."""


def main() -> None:
    """Entry point of a rank's process; the environment says which one it is. Exits with 0, 1, or 143 on SIGTERM."""
    _exit_on_sigterm()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    env = read_environment(os.environ)
    link = AgentLink(env.agent_socket)
    link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=os.getpid()))
    faulthandler.enable()
    rank = Rank(env, link)
    end_with_threads(rank.report)
    sys.exit(rank.live())


class Rank:
    """One rank of one generation; `live` is its whole life."""

    def __init__(self, env: RankEnvironment, link: AgentLink) -> None:
        self._env = env
        self._link = link
        self._beats = BeatWriter.open(env.beat_file)
        self._position = Position()
        self._restored = -1
        self._replica: Replica | None = None

    def live(self) -> int:
        """Train until something ends it; returns the exit code."""
        failure = self._train()
        if failure is None:
            return 0
        self._tell(failure)
        # the exception is gone by now, and with it what would keep the connections to the peers open
        groups.leave()
        return self._park() if failure.parked else 1

    def report(self, error: BaseException) -> None:
        """Tell of an exception that ends this rank."""
        self._tell(last_words(error, self._env, iteration=self._position.iteration))

    def _train(self) -> RankFailed | None:
        """The one place that catches: a lost peer leaves this rank's state whole, anything else does not."""
        try:
            self._set_up_and_run()
        except CollectiveFailed as error:
            return last_words(error, self._env, iteration=self._position.iteration, error_type=error.error_type, parked=True)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the agent must hear it from us
            return last_words(error, self._env, iteration=self._position.iteration)
        return None

    def _tell(self, failure: RankFailed) -> None:
        self._link.send(failure)
        log.error("%s: %s", failure.error_type, failure.message)
        if not failure.parked:
            leave_error(f"{failure.error_type}: {failure.message}", failure.traceback)

    def _set_up_and_run(self) -> None:
        env = self._env
        self._repository = CheckpointRepository(open_store(env.store_url), env.job)
        self._saver = Saver(self._repository, env)
        device = groups.choose_device(env.local_rank)
        work = Work(env.spec, rank=env.rank, world_size=env.world_size, skipped=env.skipped)
        state = self._fetch_state()
        with self._link.drains_answered_with(self._drained(env.restore_from)):
            bulletin = groups.join(env, device)
        replica = Replica(env.spec, device)
        if state is not None:
            replica.load(state)
            del state
        self._replica = replica
        loop = Loop(
            env,
            replica=replica,
            work=work,
            saver=self._saver,
            link=self._link,
            beats=self._beats,
            position=self._position,
        )
        directory = ledger_directory(env.run_dir, env.job)
        with Ledger(directory, generation=env.generation, rank=env.rank, skipped=env.skipped) as ledger:
            is_finished = loop.run(ledger)
        self._end(replica, bulletin, is_finished=is_finished)
        groups.leave()

    def _fetch_state(self) -> dict[str, torch.Tensor] | None:
        """The state to start from, None for a fresh start; raises CheckpointError when it is damaged."""
        if self._env.restore_from is None:
            return None
        started = time.monotonic()
        manifest = self._repository.load_manifest(self._env.restore_from)
        try:
            state = read_state(self._repository, manifest)
        except CheckpointError as error:
            self._repository.condemn(manifest.key, str(error))
            raise
        self._restored = self._position.iteration = manifest.iteration
        self._position.loss = manifest.loss
        elapsed = time.monotonic() - started
        log.info("restored iteration %d, %d bytes, in %.3f s", manifest.iteration, manifest.num_bytes, elapsed)
        return state

    # --- the ends ---------------------------------------------------------------------------------------------------

    def _end(self, replica: Replica, bulletin: Bulletin, *, is_finished: bool) -> None:
        """Save the last state together with the other ranks and say so."""
        env, iteration = self._env, self._position.iteration
        manifest = env.restore_from
        self._beats.mark(Section.CHECKPOINT)
        if iteration > self._restored:
            manifest = self._save_together(replica, bulletin, must_succeed=is_finished)
        if is_finished:
            loss = self._position.loss
            self._link.send(RankFinished(job=env.job, generation=env.generation, rank=env.rank, iteration=iteration, loss=loss))
        else:
            self._link.send(self._drained(manifest))

    def _save_together(self, replica: Replica, bulletin: Bulletin, *, must_succeed: bool) -> str | None:
        """Upload this rank's share; rank 0 commits and tells the others the manifest's key, None if it failed."""
        iteration = self._position.iteration
        is_saved = self._saver.save_now(self._position, replica.state())
        while must_succeed and not is_saved and not self._saver.is_stale:
            self._refuse_to_wait_in_a_drain()
            self._beats.mark()
            time.sleep(RETRY_S)
            is_saved = self._saver.save_now(self._position, replica.state())
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
            self._beats.mark()
            if key is not None:
                return key or None
            if must_succeed:
                self._refuse_to_wait_in_a_drain()
        return None

    def _refuse_to_wait_in_a_drain(self) -> None:
        """A drain while the last checkpoint is not committed: rank 0 or the store is gone, and our replica is what counts."""
        if self._link.is_draining:
            raise CollectiveFailed("StoreError", f"iteration {self._position.iteration}, the last one, could not be saved yet")

    def _park(self) -> int:
        """Keep the state of the last complete iteration until it is fetched or nobody wants it; returns the exit code."""
        self._beats.mark(Section.PARKED)
        while True:
            order = self._link.next_order().order
            match order:
                case "quit":
                    return 0
                case "save_replica":
                    self._link.send(self._replica_saved())
                case "drain" | "raise" | "nan" | "slow" | "exit":
                    log.info("parked: %s is ignored", order)
                case _:
                    assert_never(order)

    def _drained(self, manifest: str | None) -> RankDrained:
        env, iteration = self._env, self._position.iteration
        return RankDrained(job=env.job, generation=env.generation, rank=env.rank, iteration=iteration, manifest=manifest)

    def _replica_saved(self) -> RankDrained:
        """Save the whole state, unless it still is the one that was restored."""
        manifest = self._env.restore_from
        if self._replica is not None and self._position.iteration > self._restored:
            manifest = self._saver.save_replica(self._position, self._replica.state())
        return self._drained(manifest)


def _exit_on_sigterm() -> None:
    """Exit at once on SIGTERM, also while the main thread waits in a collective, where no Python handler would run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(TERMINATED)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
