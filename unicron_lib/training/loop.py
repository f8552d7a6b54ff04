"""The training loop: iterations until the last one, a drain, or an error."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.detection.loss_guard import Point
from unicron_lib.detection.sections import Section
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.skipping import Ranges
from unicron_lib.errors import StaleGeneration
from unicron_lib.training.data import open_corpus, sample_order, share
from unicron_lib.training.effort import Effort
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.flops import iteration_flops
from unicron_lib.training.groups import Meeting, finish_own_work
from unicron_lib.training.handover import Memory, Origin
from unicron_lib.training.keeping import Keeping
from unicron_lib.training.ledger import Entry, Ledger
from unicron_lib.training.link import AgentLink
from unicron_lib.training.optimizer import learning_rate
from unicron_lib.training.peers import Parked
from unicron_lib.training.progress_lines import ProgressLines
from unicron_lib.training.recheck import Recheck
from unicron_lib.training.reduction import sum_buckets
from unicron_lib.training.replica import MicroBatch, Reduced, Replica
from unicron_lib.training.saver import Saver

log = logging.getLogger(__name__)


def injected(text: str) -> Exception:
    """An exception as an order wants it: `text` is its type's name and its message, `TYPE: message`."""
    name, _, message = text.partition(": ")
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(message)


class Work:
    """One replica's part of every iteration: its micro-batches, in the canonical order. A replica is often one rank."""

    def __init__(self, spec: JobSpec, *, replica: int, num_replicas: int, skipped: Ranges = ()) -> None:
        self._spec = spec
        self._num_replicas = num_replicas
        self._corpus = open_corpus(spec)
        self._order = sample_order(spec, self._corpus, skipped)
        self.micro_batches = share(spec.num_micro_batches, rank=replica, world_size=num_replicas)

    @property
    def fair_share(self) -> float:
        """Micro-batches of a replica if all had equally many, over those that this one has."""
        return self._spec.num_micro_batches / self._num_replicas / max(1, len(self.micro_batches))

    def part_of(self, num_micro_batches: int) -> float:
        """So many micro-batches as a part of an even share, at most 1."""
        return min(1.0, num_micro_batches * self._num_replicas / self._spec.num_micro_batches)

    def do(self, replica: Replica, effort: Effort, poll: Callable[[], None] = lambda: None) -> None:
        """Add the gradients of the micro-batches that are to do; `poll` is called before each, and may raise."""
        with replica.sparing(effort.reduced if effort.todo else ()):
            batches = (self._micro_batch(effort.iteration, number, replica.device) for number in tuple(effort.todo))
            for batch in replica.add_micro_batches(batches, poll):
                effort.finish(batch.number)

    def add_gradients(self, replica: Replica, iteration: int, micro_batch: int) -> None:
        """Add those of one micro-batch of an iteration, whoever's it is; all ranks of the replica have to."""
        for _ in replica.add_micro_batches((self._micro_batch(iteration, micro_batch, replica.device),)):
            pass

    def _micro_batch(self, iteration: int, number: int, device: torch.device) -> MicroBatch:
        size = self._spec.micro_batch_size
        first = number * size
        taken = self._order.samples(iteration)[first : first + size]
        tokens = torch.stack([torch.frombuffer(bytearray(self._corpus.sample(s)), dtype=torch.uint8) for s in taken])
        return MicroBatch(number=number, iteration=iteration, first=first, samples=taken, tokens=tokens.to(device, torch.int64))


class Loop:
    """Runs a rank's iterations in one generation, after the hand-over.

    `memory` is right at any moment, also after CollectiveFailed and Parked: the next generation goes on with it. `origin` is
    told with all progress.
    """

    def __init__(
        self,
        env: RankEnvironment,
        *,
        memory: Memory,
        meeting: Meeting,
        work: Work,
        saver: Saver,
        link: AgentLink,
        beats: BeatWriter,
        origin: Origin,
    ) -> None:
        self._env = env
        self._beats = beats
        self._spec = env.spec
        self._memory = memory
        self._replica, self._effort, self._position = memory.replica, memory.effort, memory.position
        self._column = meeting.column
        self._work = work
        self._saver = saver
        self._link = link
        self._progress = ProgressLines(env, link.send_line, **asdict(origin))
        self._flops = iteration_flops(env.spec)
        self._keeping = Keeping(env, memory, self._mark)
        self._recheck = Recheck(env.spec, memory=memory, peers=meeting.peers, add_gradients=work.add_gradients, mark=self._mark)

    def run(self, ledger: Ledger) -> bool:
        """Train; True when the last iteration is done, False when a drain has stopped all ranks before it.

        Raises CollectiveFailed when a peer is lost, and Parked when the agent wants this rank to leave its iteration; and what
        Recheck raises.
        """
        self._recheck.run()
        ended = time.monotonic()
        while self._position.iteration + 1 < self._spec.train_iters:
            started, iteration = ended, self._position.iteration + 1
            self._mark(Section.STEP)
            reduced, compute_s = self._iterate(iteration, started)
            ledger.write(Entry(iteration=iteration, samples=reduced.samples, loss=reduced.loss))
            ended = time.monotonic()
            # 0: not measured, it was done by several generations
            iteration_s = 0.0 if reduced.is_resumed else ended - started
            self._beats.complete(iteration, iteration_s)
            self._doubt(reduced)
            self._report(reduced, iteration_s, compute_s)
            is_last = iteration + 1 == self._spec.train_iters
            if reduced.stop and not is_last:
                return False
            if self._recheck.run():
                ended = time.monotonic()
            if not is_last and self._keeping.keep(reduced):
                ended = time.monotonic()
            if reduced.save and not is_last:
                self._memory.saved, self._memory.saved_at = iteration, time.monotonic()
                self._beats.mark(Section.CHECKPOINT)
                self._saver.begin(self._position, self._replica.state())
                ended = time.monotonic()
        return True

    def _doubt(self, reduced: Reduced) -> None:
        """Have the saver keep what is from before a spike of the loss, as long as it may be gone back to."""
        point = Point(iteration=self._position.iteration, loss=reduced.loss, grad_norm=reduced.grad_norm)
        self._memory.doubt.look(self._env.generation, point)
        self._saver.doubted_from = self._memory.doubt.since

    def _iterate(self, iteration: int, started: float) -> tuple[Reduced, float]:
        """One iteration: the parameters change only once all ranks' gradients have arrived. Also what its own part took."""
        if self._saver.is_stale:
            raise StaleGeneration(f"generation {self._env.generation} of job {self._env.job} was replaced")
        effort = self._effort
        if effort.iteration != iteration:
            self._replica.begin()
            effort.begin(iteration, self._work.micro_batches)
        compute_s = self._compute(started)
        self._flag(iteration)
        self._mark(Section.COLLECTIVE)
        sum_buckets(self._replica, self._column, effort, generation=self._env.generation, poll=self._poll)
        # who wanted the others to stop in an earlier generation has got what it wanted: this generation
        is_new = effort.reduced[self._replica.last_bucket] == self._env.generation
        on_ready = partial(effort.prepare, self._env.generation)
        reduced = replace(self._replica.reduced(heeds_stop=is_new, on_ready=on_ready), is_resumed=effort.is_resumed)
        self._mark(Section.STEP)
        norm = self._replica.step(iteration)
        self._position.advance(iteration, generation=self._env.generation, loss=reduced.loss, grad_norm=norm)
        effort.clear()
        return replace(reduced, grad_norm=norm), compute_s

    def _compute(self, started: float) -> float:
        """The rank's own part of an iteration; seconds that it would take if all ranks had equally many micro-batches.

        0, not measured, if the iteration was begun in an earlier generation.
        """
        part = self._work.part_of(len(self._effort.todo)) if self._effort.is_resumed else 1.0
        began = time.monotonic()
        self._work.do(self._replica, self._effort, self._poll)
        finish_own_work(self._replica.device)
        compute_s = (time.monotonic() - began) * self._work.fair_share
        # the pace comes before the all-reduce, so that a drain that arrives meanwhile stops this iteration, not the next
        self._pause(part * self._spec.pace_s - (time.monotonic() - started))
        delay_s = (self._link.slowness - 1.0) * (time.monotonic() - started)
        self._pause(delay_s)
        return 0.0 if self._effort.is_resumed else max(compute_s, self._spec.pace_s) + delay_s

    def _flag(self, iteration: int) -> None:
        """Tell the others what they have to know, unless that is summed already: then an order or fault waits an iteration."""
        if self._replica.last_bucket in self._effort.reduced:
            return
        fault = self._link.take_fault()
        if fault == "raise":
            raise injected(self._link.injected_text or f"InjectedError: injected in iteration {iteration}")
        if fault == "corrupt":
            self._replica.corrupt()
        is_due, votes = self._is_save_due(iteration), self._keeping.votes(iteration)
        self._replica.flag(stop=self._is_to_stop, save=is_due, spoil=fault == "nan", votes=votes)
        if fault == "spike" and not self._effort.is_resumed:
            self._replica.turn_around()

    def _poll(self) -> None:
        """A sign of life, and the place where the agent can make this rank leave an iteration."""
        if self._link.wants_park:
            raise Parked(f"iteration {self._effort.iteration}: {len(self._effort.done)} micro-batches are kept")
        self._beats.mark()

    def _pause(self, seconds: float) -> None:
        if seconds > 0.0:
            self._link.rest(seconds)
            self._poll()

    @property
    def _is_to_stop(self) -> bool:
        return self._link.is_draining or self._link.is_parking

    def _mark(self, section: Section) -> None:
        """A drain has a deadline of its own."""
        self._beats.mark(Section.DRAINING if self._is_to_stop else section)

    def _is_save_due(self, iteration: int) -> bool:
        """Rank 0 decides for all: a save that was due, or ordered, while another was in flight is made up for."""
        if self._env.rank != 0 or self._saver.is_busy:
            return False
        return self._link.take_save() or self._is_turn(iteration)

    def _is_turn(self, iteration: int) -> bool:
        interval = self._spec.save_interval
        if interval:
            return (iteration + 1) // interval > (self._memory.saved + 1) // interval
        return time.monotonic() - self._memory.saved_at >= self._saver.pause_s

    def _report(self, reduced: Reduced, iteration_s: float, compute_s: float) -> None:
        iteration = self._position.iteration
        self._progress.tell(
            iteration,
            loss=reduced.loss,
            iteration_s=iteration_s,
            flops=self._flops / iteration_s if iteration_s else 0.0,
            compute_s=compute_s,
            grad_norm=reduced.grad_norm,
        )
        self._memory.given_up = 0  # the first of a generation tells of it
        if (iteration + 1) % self._spec.log_interval == 0:
            done, samples = iteration + 1, (iteration + 1) * self._spec.global_batch_size
            log.info(
                "iteration %8d/%8d | consumed samples: %12d | elapsed time per iteration (ms): %.1f | learning rate: %.6E | "
                "global batch size: %5d | lm loss: %.6E | grad norm: %.3f |",
                *(done, self._spec.train_iters, samples, 1000 * iteration_s, learning_rate(self._spec, iteration)),
                *(self._spec.global_batch_size, reduced.loss, reduced.grad_norm),
            )
