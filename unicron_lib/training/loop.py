"""The training loop: iterations until the last one, a drain, or an error."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.detection.sections import Section
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.skipping import Ranges
from unicron_lib.errors import StaleGeneration
from unicron_lib.training.data import open_corpus, sample_order, share
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.flops import iteration_flops
from unicron_lib.training.groups import finish_own_work, sum_over_ranks
from unicron_lib.training.ledger import Entry, Ledger
from unicron_lib.training.link import AgentLink
from unicron_lib.training.optimizer import learning_rate
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Reduced, Replica
from unicron_lib.training.saver import Saver

log = logging.getLogger(__name__)


def injected(text: str) -> Exception:
    """An exception as an order wants it: `text` is its type's name and its message, `TYPE: message`."""
    name, _, message = text.partition(": ")
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(message)


class Work:
    """One rank's part of every iteration: its micro-batches, in the canonical order."""

    def __init__(self, spec: JobSpec, *, rank: int, world_size: int, skipped: Ranges = ()) -> None:
        self._spec = spec
        self._world_size = world_size
        self._corpus = open_corpus(spec)
        self._order = sample_order(spec, self._corpus, skipped)
        self._micro_batches = share(spec.num_micro_batches, rank=rank, world_size=world_size)

    @property
    def fair_share(self) -> float:
        """Micro-batches of a rank if all had equally many, over those that this one has."""
        return self._spec.num_micro_batches / self._world_size / max(1, len(self._micro_batches))

    def add_gradients(self, replica: Replica, iteration: int, mark: Callable[[], None] = lambda: None) -> None:
        """Clear the replica's buffer and add the rank's part of the iteration's gradient to it; a `mark` a micro-batch."""
        replica.begin()
        samples = self._order.samples(iteration)
        size = self._spec.micro_batch_size
        for micro_batch in self._micro_batches:
            first = micro_batch * size
            taken = samples[first : first + size]
            tokens = torch.stack([torch.frombuffer(bytearray(self._corpus.sample(s)), dtype=torch.uint8) for s in taken])
            replica.add_micro_batch(taken, tokens.to(replica.device, torch.int64), first=first)
            mark()


class Loop:
    """Runs a rank's iterations. `position` is right at any moment, also after an exception."""

    def __init__(
        self,
        env: RankEnvironment,
        *,
        replica: Replica,
        work: Work,
        saver: Saver,
        link: AgentLink,
        beats: BeatWriter,
        position: Position,
    ) -> None:
        self._env = env
        self._beats = beats
        self._spec = env.spec
        self._replica = replica
        self._work = work
        self._saver = saver
        self._link = link
        self._position = position
        self._last_save = position.iteration
        self._flops = iteration_flops(env.spec)

    def run(self, ledger: Ledger) -> bool:
        """Train; True when the last iteration is done, False when a drain has stopped all ranks before it."""
        ended = time.monotonic()
        while self._position.iteration + 1 < self._spec.train_iters:
            started, iteration = ended, self._position.iteration + 1
            self._mark(Section.STEP)
            reduced, compute_s = self._iterate(iteration, started)
            ledger.write(Entry(iteration=iteration, samples=reduced.samples, loss=reduced.loss))
            ended = time.monotonic()
            self._beats.complete(iteration, ended - started)
            self._report(reduced, ended - started, compute_s)
            is_last = iteration + 1 == self._spec.train_iters
            if reduced.stop and not is_last:
                return False
            if reduced.save and not is_last:
                self._last_save = iteration
                self._beats.mark(Section.CHECKPOINT)
                self._saver.begin(self._position, self._replica.state())
                ended = time.monotonic()
        return True

    def _iterate(self, iteration: int, started: float) -> tuple[Reduced, float]:
        """One iteration: the parameters change only once all ranks' gradients have arrived. Also what its own part took."""
        if self._saver.is_stale:
            raise StaleGeneration(f"generation {self._env.generation} of job {self._env.job} was replaced")
        compute_s = self._compute(iteration, started)
        fault = self._link.take_fault()
        if fault == "raise":
            raise injected(self._link.injected_text or f"InjectedError: injected in iteration {iteration}")
        self._replica.flag(stop=self._link.is_draining, save=self._is_save_due(iteration), spoil=fault == "nan")
        self._mark(Section.COLLECTIVE)
        sum_over_ranks(self._replica.buffer)
        reduced = self._replica.reduced()
        self._mark(Section.STEP)
        norm = self._replica.step(iteration)
        self._position.iteration, self._position.loss = iteration, reduced.loss
        return replace(reduced, grad_norm=norm), compute_s

    def _compute(self, iteration: int, started: float) -> float:
        """The rank's own part of an iteration; seconds that it would take if all ranks had equally many micro-batches."""
        began = time.monotonic()
        self._work.add_gradients(self._replica, iteration, self._beats.mark)
        finish_own_work(self._replica.device)
        compute_s = (time.monotonic() - began) * self._work.fair_share
        # the pace comes before the all-reduce, so that a drain that arrives meanwhile stops this iteration, not the next
        time.sleep(max(0.0, self._spec.pace_s - (time.monotonic() - started)))
        delay_s = (self._link.slowness - 1.0) * (time.monotonic() - started)
        time.sleep(delay_s)
        return max(compute_s, self._spec.pace_s) + delay_s

    def _mark(self, section: Section) -> None:
        """A drain has a deadline of its own."""
        self._beats.mark(Section.DRAINING if self._link.is_draining else section)

    def _is_save_due(self, iteration: int) -> bool:
        """Rank 0 decides for all: a save whose turn came while another was in flight is made up for."""
        interval = self._spec.save_interval
        is_due = (iteration + 1) // interval > (self._last_save + 1) // interval
        return self._env.rank == 0 and is_due and not self._saver.is_busy

    def _report(self, reduced: Reduced, iteration_s: float, compute_s: float) -> None:
        iteration = self._position.iteration
        progress = Progress(
            job=self._env.job,
            generation=self._env.generation,
            rank=self._env.rank,
            iteration=iteration,
            loss=reduced.loss,
            iteration_s=iteration_s,
            flops=self._flops / iteration_s,
            world_size=self._env.world_size,
            at=time.time(),
            compute_s=compute_s,
            grad_norm=reduced.grad_norm,
        )
        self._link.send(progress)
        if (iteration + 1) % self._spec.log_interval == 0:
            done, samples = iteration + 1, (iteration + 1) * self._spec.global_batch_size
            log.info(
                "iteration %8d/%8d | consumed samples: %12d | elapsed time per iteration (ms): %.1f | learning rate: %.6E | "
                "global batch size: %5d | lm loss: %.6E | grad norm: %.3f |",
                *(done, self._spec.train_iters, samples, 1000 * iteration_s, learning_rate(self._spec, iteration)),
                *(self._spec.global_batch_size, reduced.loss, reduced.grad_norm),
            )
