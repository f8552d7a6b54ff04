"""The detectors on trial: simulated training with real jitter, hangs and stragglers at random moments. Pure and seeded."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from unicron_lib.detection.pace import Beat, Pace, Resumed, Stalled
from unicron_lib.detection.sections import Limits, Section
from unicron_lib.detection.straggler import StragglerWatch
from unicron_lib.detection.windows import Windows

LOOK_S = 0.1
FIRST_ITERATION, FIRST_ITERATION_S = 60.0, 200.0
"""What the first iteration takes more, in usual iterations, but no more than so many seconds."""
COLLECTIVE = 0.02
"""Duration of the all-reduce, in usual iterations."""
FAULT_EVERY = (100, 600)
"""Iterations between faults, from and to; half of them are hangs."""
STRAGGLE_FOR = 2000
HEALED_FOR = 600
LONG = 2.0
"""Usual iterations from which on a rank's own part is looked at more closely."""
WAITS = 0.1
"""Share of a rank's own part in which it does nothing at a stretch, wherever: it waits for data."""
SPINS = 0.3
"""Share of the hangs in which the rank does not stand still but spins: it looks as busy as in a long iteration."""
HANG_BAR_S = 0.5
"""What a hang may be told later than at the hang factor times the mean iteration."""
Hang = Literal["still", "spinning"]


class Promptness(StrEnum):
    """Whether every hang of a rank that stands still was told within `Verdict.hang_bar`."""

    OK = "ok"
    MISSED = "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How a job's iterations vary.

    `sigma` is the log-normal jitter of each rank, `lengths` are equally likely factors of a whole iteration (sequence
    lengths). Evaluations take `eval_iterations` (from, to) usual iterations, checkpoints `checkpoint_iterations`.
    """

    iteration_s: float = 1.0
    sigma: float = 0.05
    lengths: Sequence[float] = (1.0,)
    hours: float = 24.0
    num_ranks: int = 8
    eval_every: tuple[int, int] = (50, 500)
    eval_iterations: tuple[int, int] = (4, 40)
    checkpoint_every: int = 100
    checkpoint_iterations: float = 5.0
    slow_factors: Sequence[float] = (1.2, 1.5)
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the detectors made of it.

    `mean_s` is the mean duration of an iteration; `latest_hang`, the longest time from a hang to the word about it, is in
    multiples of that, `latest_straggler` in iterations. `latest_hang` is of ranks that stand still, which can be seen;
    `latest_spinning` of those that spin, and are waited for as for a long iteration. `hangs` are both.
    """

    hours: float
    iterations: int
    mean_s: float
    false_alarms: int
    hangs: int
    hangs_found: int
    stragglers: int
    stragglers_found: int
    latest_hang: float
    latest_straggler: int
    spinning: int = 0
    spinning_found: int = 0
    latest_spinning: float = 0.0

    @property
    def recall(self) -> float:
        """Found faults as a share of the injected ones."""
        return (self.hangs_found + self.stragglers_found) / max(1, self.hangs + self.stragglers)

    @property
    def precision(self) -> float:
        """Right alarms as a share of all."""
        found = self.hangs_found + self.stragglers_found
        return found / max(1, found + self.false_alarms)

    @property
    def hang_bar(self) -> float:
        """The latest moment at which a hang should be told, in mean iterations: three of them, and half a second."""
        return Limits().hang_factor + HANG_BAR_S / self.mean_s

    @property
    def promptness(self) -> Promptness:
        """Whether the latest hang was told in time."""
        return Promptness.OK if self.latest_hang <= self.hang_bar else Promptness.MISSED

    @property
    def ok(self) -> bool:
        """No false alarm, nothing overlooked, nothing late."""
        return self.false_alarms == 0 and self.recall == 1.0 and self.promptness is Promptness.OK


class Trial:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = random.Random(scenario.seed)  # noqa: S311 - a simulation guards nothing
        self._now = 0.0
        self._generation = 0
        self._iteration = 0
        self._total = 0
        self._watch = StragglerWatch()
        self._slow: tuple[int, float, int] | None = None
        self._slow_found = False
        self._false = 0
        self._iterating_s, self._num_iterated = 0.0, 0
        self._hangs: list[tuple[Hang, float | None]] = []
        self._stragglers: list[int | None] = []
        self._restart()

    def run(self) -> Verdict:
        """Train for the scenario's hours."""
        scenario = self._scenario
        next_fault, next_pause = self._next_fault(), self._random.randint(*scenario.eval_every)
        while self._now < scenario.hours * 3600 or self._slow:
            if self._total >= next_fault and self._slow is None:
                next_fault = self._total + self._next_fault()
                if self._random.random() < 0.5:
                    self._hang()
                    continue
                self._slow, self._slow_found = self._new_straggler(), False
            self._iterate()
            self._end_straggler()
            if self._total >= next_pause:
                next_pause = self._total + self._random.randint(*scenario.eval_every)
                self._pause(Section.EVAL, self._random.randint(*scenario.eval_iterations))
            if self._total % scenario.checkpoint_every == 0:
                self._pause(Section.CHECKPOINT, scenario.checkpoint_iterations)
        return self._verdict()

    # --- what happens -----------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """A transition: everything is learned anew, and the first iteration is slow."""
        self._generation += 1
        self._iteration = 0
        self._last_s = 0.0
        self._paces = [Pace(Limits()) for _ in range(self._scenario.num_ranks)]
        self._marks = 0
        self._windows = Windows()

    def _next_fault(self) -> int:
        return self._random.randint(*FAULT_EVERY)

    def _new_straggler(self) -> tuple[int, float, int]:
        self._stragglers.append(None)
        return self._random.randrange(self._scenario.num_ranks), self._random.choice(self._scenario.slow_factors), self._total

    def _parts(self) -> list[float]:
        """What each rank needs for its own part of the next iteration."""
        scenario, draw = self._scenario, self._random.lognormvariate
        usual_s = scenario.iteration_s * self._random.choice(scenario.lengths)
        extra_s = 0.0 if self._iteration else min(FIRST_ITERATION * usual_s, FIRST_ITERATION_S)
        parts = [extra_s + usual_s * draw(0.0, scenario.sigma) for _ in range(scenario.num_ranks)]
        if self._slow and not self._slow_found:
            parts[self._slow[0]] *= self._slow[1]
        return parts

    def _iterate(self) -> None:
        """One iteration; the watcher looks at the worst moments, just before a rank gives its next sign."""
        parts, began = self._parts(), self._now
        end = began + max(parts) + COLLECTIVE * self._scenario.iteration_s
        for pace, part in zip(self._paces, parts, strict=True):
            self._look_at_part(pace, began, part)
            self._judge(pace.look(self._beat(Section.COLLECTIVE, began + part, 1), end))
        self._end_iteration(end)
        for rank, part in enumerate(parts):
            self._windows.add(rank, self._iteration, compute_s=part, iteration_s=end - began)
        window = self._windows.newest
        for finding in self._watch.look(self._generation, window):
            self._judge_finding(finding.rank, over=finding.over)

    def _look_at_part(self, pace: Pace, began: float, part: float) -> None:
        """At its end the rank has worked, at the end of its wait for data it has not."""
        beat = self._beat(Section.STEP, began)
        if part > LONG * self._scenario.iteration_s:
            waited_s = WAITS * part
            self._judge(pace.look(beat, began + waited_s + self._random.random() * (part - waited_s), still_s=waited_s))
        self._judge(pace.look(beat, began + part))

    def _pause(self, section: Section, iterations: float) -> None:
        end = self._now + iterations * self._scenario.iteration_s
        for pace in self._paces:
            self._judge(pace.look(self._beat(section, self._now), end))
        self._now = end
        self._marks += 1

    def _hang(self) -> None:
        """A rank stops in the middle of its part; the others come to wait for it."""
        parts, began = self._parts(), self._now
        culprit = self._random.randrange(len(parts))
        hang: Hang = "spinning" if self._random.random() < SPINS else "still"
        moment = began + parts[culprit] * self._random.random()
        told_s = None
        for elapsed_s in self._looks():
            now, still_s = moment + elapsed_s, 0.0 if hang == "spinning" else elapsed_s - LOOK_S
            if isinstance(self._paces[culprit].look(self._beat(Section.STEP, began), now, still_s=still_s), Stalled):
                self._now, told_s = now, elapsed_s
                break
        self._hangs.append((hang, told_s))
        self._restart()

    def _looks(self) -> Iterator[float]:
        return (LOOK_S * (number + 1) for number in range(int(100 * self._scenario.iteration_s / LOOK_S)))

    def _beat(self, section: Section, at: float, more: int = 0) -> Beat:
        return Beat(iteration=self._iteration - 1, section=section, marks=self._marks + more, at=at, iteration_s=self._last_s)

    def _end_iteration(self, end: float) -> None:
        self._last_s, self._now = end - self._now, end
        if self._iteration > 0 and self._slow is None:
            self._iterating_s += self._last_s
            self._num_iterated += 1
        self._iteration += 1
        self._total += 1
        self._marks += 2

    # --- what is made of it -----------------------------------------------------------------------------------------

    def _judge(self, found: Stalled | Resumed | None) -> None:
        self._false += isinstance(found, Stalled)

    def _judge_finding(self, rank: int | None, *, over: bool) -> None:
        if self._slow and not self._slow_found and rank == self._slow[0] and not over:
            self._slow_found = True
            self._stragglers[-1] = self._total - self._slow[2]
            self._slow = (*self._slow[:2], self._total)
        elif not over:
            self._false += 1

    def _end_straggler(self) -> None:
        """A straggler is cured when it is found, and missed after a while."""
        if self._slow and self._total - self._slow[2] > (HEALED_FOR if self._slow_found else STRAGGLE_FOR):
            self._slow = None

    def _verdict(self) -> Verdict:
        mean_s = self._iterating_s / max(1, self._num_iterated)
        still = [seconds for hang, seconds in self._hangs if hang == "still" and seconds is not None]
        spinning = [seconds for hang, seconds in self._hangs if hang == "spinning" and seconds is not None]
        stragglers = [iterations for iterations in self._stragglers if iterations is not None]
        return Verdict(
            hours=self._now / 3600,
            iterations=self._total,
            mean_s=mean_s,
            false_alarms=self._false,
            hangs=len(self._hangs),
            hangs_found=len(still) + len(spinning),
            stragglers=len(self._stragglers),
            stragglers_found=len(stragglers),
            latest_hang=max(still, default=0.0) / mean_s,
            latest_straggler=max(stragglers, default=0),
            spinning=sum(hang == "spinning" for hang, _ in self._hangs),
            spinning_found=len(spinning),
            latest_spinning=max(spinning, default=0.0) / mean_s,
        )


def try_detection(scenario: Scenario) -> Verdict:
    """Run a scenario to its end; the same seed gives the same verdict."""
    return Trial(scenario).run()
