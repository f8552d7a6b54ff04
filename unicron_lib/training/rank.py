"""A rank's life: it trains in one generation after another, and keeps its memory from each to the next.

`life` has the table of its states, `term` what it does in one generation.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import unicron_lib.training.quiet  # before anything that imports torch

# isort: split
import torch

# imported here so that ranks, forked from a process that has imported this module, need not
import unicron_lib.adapters.s3  # noqa: F401
from unicron_lib.adapters.s3_client import learn
from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.error_file import leave_error
from unicron_lib.agent.rank_messages import RankFailed, RankHello, RankParked
from unicron_lib.checkpointing.slots import TRAVELS, SlotPair
from unicron_lib.detection.sections import Section
from unicron_lib.training import groups
from unicron_lib.training.abort import Breaker
from unicron_lib.training.doubt import Doubt
from unicron_lib.training.environment import LOG_FILE, RankEnvironment, read_environment, replace_environment
from unicron_lib.training.handover import Memory
from unicron_lib.training.last_words import end_with_threads, last_words
from unicron_lib.training.link import AgentLink
from unicron_lib.training.output import write_to
from unicron_lib.training.peers import CollectiveFailed, Parked
from unicron_lib.training.replica import Replica
from unicron_lib.training.siblings import Siblings
from unicron_lib.training.snapshots import Snapshots
from unicron_lib.training.term import Term

log = logging.getLogger(__name__)
TERMINATED = 143

learn()  # here for the same reason


def main() -> None:
    """Entry point of a rank's process; the environment says which one it is. Exits with 0, 1, or 143 on SIGTERM."""
    _exit_on_sigterm()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    env = read_environment(os.environ)
    link = AgentLink(env.agent_socket, Breaker(groups.abort_groups))
    link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=os.getpid()))
    faulthandler.enable()
    rank = Rank(env, link)
    end_with_threads(rank.report)
    sys.exit(rank.live())


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What ended a generation before the rank was through with it; no `failure` if it was ordered to park."""

    failure: RankFailed | None = None

    @property
    def is_parked(self) -> bool:
        """Whether the rank's memory is whole, so that it waits for what comes next."""
        return self.failure is None or self.failure.parked


class Rank:
    """One rank's process; `live` is its whole life."""

    def __init__(self, env: RankEnvironment, link: AgentLink) -> None:
        self._env = env
        self._link = link
        self._beats = BeatWriter.open(env.beat_file)
        self._term: Term | None = None
        self._memory: Memory | None = None

    def live(self) -> int:
        """Train, through all generations, until something ends it; returns the exit code."""
        while (interruption := self._train()) is not None:
            self._say(interruption)
            # the exception is gone by now, and with it what would keep the connections to the peers open
            groups.leave()
            if not interruption.is_parked:
                return 1
            if (assigned := self._wait()) is None:
                return 0
            self._take_place(assigned)
        return 0

    def report(self, error: BaseException) -> None:
        """Tell of an exception that ends this rank."""
        self._tell(last_words(error, self._env, iteration=self._iteration))

    def _train(self) -> Interruption | None:
        """The one place that catches: a lost peer leaves this rank's memory whole, anything else does not."""
        try:
            self._term = Term(self._env, self._link, self._beats)
            self._term.run(self._memory_for(self._env))
        except Parked:
            return Interruption()
        except CollectiveFailed as error:
            return Interruption(
                failure=last_words(error, self._env, iteration=self._iteration, error_type=error.error_type, parked=True)
            )
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the agent must hear it from us
            return Interruption(failure=last_words(error, self._env, iteration=self._iteration))
        groups.leave()
        return None

    def _memory_for(self, env: RankEnvironment) -> Memory:
        """What the rank has, if it is in the same place of the same layout as before; else room for what it will have."""
        if self._memory is None or not self._memory.replica.siblings.has(env.layout, env.place):
            device = self._memory.replica.device if self._memory else groups.choose_device(env.local_rank)
            account = self._memory.account if self._memory else {}
            self._memory = None  # before there is room for another one
            self._memory = replace(_fresh(env, device), **account)
        return self._memory

    def _say(self, interruption: Interruption) -> None:
        failure = interruption.failure
        if not interruption.is_parked:
            assert failure is not None
            self._tell(failure)
            return
        self._beats.mark(Section.PARKED)
        parked = self._parked()
        if self._link.park(parked, failure) or failure is None:
            log.info("parked after iteration %d with %d micro-batches more", parked.iteration, parked.micro_batches)
        else:
            log.error("%s: %s", failure.error_type, failure.message)

    def _tell(self, failure: RankFailed) -> None:
        self._link.send(failure)
        log.error("%s: %s", failure.error_type, failure.message)
        leave_error(f"{failure.error_type}: {failure.message}", failure.traceback)

    def _wait(self) -> Mapping[str, str] | None:
        """Keep the memory until the rank has a place again, which is returned, or nobody wants it."""
        while True:
            order = self._link.next_order()
            match order.order:
                case "quit":
                    return None
                case "assign":
                    return order.environment
                case "save_replica":
                    assert self._term is not None
                    writes_as = order.environment.get("UNICRON_GENERATION")
                    self._link.send(self._term.save_replica(self._memory, writes_as=writes_as))
                case _:
                    log.info("parked: %s is ignored", order.order)

    def _take_place(self, variables: Mapping[str, str]) -> None:
        """Become the rank that `variables` say. The device stays, whatever its number is there: the memory is on it."""
        if self._term is not None:
            self._term.close()
        before, self._env = self._env, replace_environment(os.environ, variables)
        write_to(os.environ.get(LOG_FILE))
        self._beats = BeatWriter.open(self._env.beat_file)
        log.info(
            "rank %d of generation %d goes on as rank %d of generation %d",
            *(before.rank, before.generation, self._env.rank, self._env.generation),
        )

    @property
    def _iteration(self) -> int:
        """The last one that is complete in the parameters, -1 for none."""
        return self._memory.position.iteration if self._memory and self._memory.position.is_whole else -1

    def _parked(self) -> RankParked:
        env = self._env
        kept = len(self._memory.effort.done) if self._memory and self._memory.position.is_whole else 0
        return RankParked(job=env.job, generation=env.generation, rank=env.rank, iteration=self._iteration, micro_batches=kept)


def _fresh(env: RankEnvironment, device: torch.device) -> Memory:
    """A memory without a state."""
    replica = Replica(env.spec, device, Siblings(env.layout, env.place))
    snapshots = _snapshots(env, env.memory_dir) if env.memory_dir else None
    doubt = Doubt(env.spec.loss_spike_patience_iters if env.spec.guards_loss else None)
    return Memory(replica=replica, snapshots=snapshots, doubt=doubt)


def _snapshots(env: RankEnvironment, directory: Path) -> Snapshots:
    part = env.layout.part(env.rank)
    return Snapshots(SlotPair(directory, part), env.spec, travelling=SlotPair(directory, part, TRAVELS) if part else None)


def _exit_on_sigterm() -> None:
    """Exit at once on SIGTERM, also while the main thread waits in a collective, where no Python handler would run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(TERMINATED)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
