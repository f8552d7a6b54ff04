"""Does every rank still compute what the others compute? Looked at every few iterations, between two of them.

After the step all ranks hold the same parameters, so that all must get the same gradient of one and the same micro-batch: the
first of the iteration that is complete. They compute it into the gradient buffer, which is free then, and exchange digests of
it and of their states. Only when these differ is it done `RERUNS` more times, to tell who is wrong (`outvoting`).

What it costs every `rerun_check_interval` iterations is one micro-batch, one look at all of the state and the gradient, and one
exchange of a few bytes. On one core, with 25 million parameters and 256 tokens, that is 0.54 s and 0.06 s.

Of cut replicas those ranks are compared that have the same part, and all compute again if any differ: none can do it alone.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from pydantic import TypeAdapter

from unicron_lib.detection.sections import Section
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.digests import digest_of
from unicron_lib.training.effort import NONE
from unicron_lib.training.handover import Memory
from unicron_lib.training.outvoting import Finding, InDoubt, Outcome, Result, Told, all_agree, judge
from unicron_lib.training.peers import CollectiveFailed, Peers
from unicron_lib.training.replica import Replica

log = logging.getLogger(__name__)
RERUNS = 3
"""The more often it is done again, the less likely a kernel that is not deterministic is taken for a broken rank."""
_told: TypeAdapter[Told] = TypeAdapter(Told)


class WrongResult(InDoubt, Exception):
    """The rank itself computes wrongly."""

    def __init__(self, message: str, spoiled: tuple[int, int]) -> None:
        super().__init__(message)
        self.spoiled = spoiled
        self.verdict = "exclude"


class ResultsDiffer(InDoubt, Exception):
    """Some rank computes wrongly, and nobody knows which one."""

    def __init__(self, message: str, spoiled: tuple[int, int]) -> None:
        super().__init__(message)
        self.spoiled = spoiled


class PeerComputesWrongly(InDoubt, CollectiveFailed):
    """Another rank does, and ends itself; this one's own parameters have its results in them."""

    def __init__(self, message: str, spoiled: tuple[int, int]) -> None:
        super().__init__(type(self).__name__, message)
        self.spoiled = spoiled


AddGradients = Callable[[Replica, int, int], None]
"""Adds what a micro-batch of an iteration, given by their numbers, contributes to the replica's buffer."""


class Recheck:
    """The check of one rank in one generation; all ranks of it must call `run` at the same places."""

    def __init__(
        self, spec: JobSpec, *, memory: Memory, peers: Peers, add_gradients: AddGradients, mark: Callable[[Section], None]
    ) -> None:
        self._siblings = memory.replica.siblings
        self._interval = spec.rerun_check_interval if peers.size > self._siblings.layout.replica_size else 0
        self._last = spec.train_iters - 1
        self._memory = memory
        self._peers = peers
        self._add_gradients = add_gradients
        self._mark = mark

    def run(self) -> bool:
        """Check if that is due; whether it was.

        Raises WrongResult if this rank is wrong, PeerComputesWrongly if others are, ResultsDiffer if nobody knows; and, as
        whatever needs all ranks, CollectiveFailed.
        """
        iteration = self._memory.position.iteration
        if not self._is_due(iteration):
            return False
        told = self._exchange(() if self._memory.is_recheck_off else self._compute(iteration, times=1))
        if any(one.is_off for one in told):
            self._turn_off()
        elif not all_agree(told):
            log.warning("iteration %d: the ranks' results of one micro-batch differ, it is done again", iteration)
            again = self._exchange(self._compute(iteration, times=RERUNS))
            whole = [replace(one, results=one.results + more.results) for one, more in zip(told, again, strict=True)]
            self._act_on(judge(whole, replica_size=self._siblings.layout.replica_size), iteration)
        self._mark(Section.STEP)
        return True

    def _is_due(self, iteration: int) -> bool:
        """The same on all ranks and in all generations, so that no iteration begins behind a check that was interrupted.

        While the next iteration is under way, whoever has begun it was through with the check.
        """
        if not self._interval or iteration < 0 or self._memory.effort.iteration != NONE:
            return False
        return (iteration + 1) % self._interval == 0 or iteration == self._last

    def _compute(self, iteration: int, *, times: int) -> tuple[Result, ...]:
        self._mark(Section.STEP)
        replica = self._memory.replica
        with reproducible() if replica.device.type == "cuda" else nullcontext():
            return tuple(self._once(replica, iteration) for _ in range(times))

    def _once(self, replica: Replica, iteration: int) -> Result:
        replica.begin()
        self._add_gradients(replica, iteration, 0)
        with replica.filling() as flats:
            return Result(state=digest_of(flats), gradient=digest_of([replica.buffer]))

    def _exchange(self, results: tuple[Result, ...]) -> list[Told]:
        kind = " ".join(filter(None, (kind_of(self._memory.replica.device), self._siblings.part)))
        own = Told(kind=kind, results=results, is_off=self._memory.is_recheck_off)
        self._mark(Section.COLLECTIVE)
        return [_told.validate_json(told) for told in self._peers.exchange(_told.dump_json(own))]

    def _act_on(self, finding: Finding, iteration: int) -> None:
        """All ranks have come to the same finding, and each does its own part. What is wrong is nowhere gone on from."""
        self._memory.position.is_whole = finding.outcome is Outcome.NOT_DETERMINISTIC
        spoiled = (iteration // self._interval * self._interval, iteration)
        since = f"iterations {spoiled[0]} to {spoiled[1]} cannot be trusted"
        match finding.outcome:
            case Outcome.WRONG:
                told = "; ".join(f"rank {rank} computes wrongly, {why}" for rank, why in sorted(finding.wrong.items()))
                error = WrongResult if self._peers.rank in finding.wrong else PeerComputesWrongly
                raise error(f"{told}: {since}", spoiled)
            case Outcome.UNDETERMINED:
                told = "the ranks' results of one micro-batch differ, and too few are equal to tell which of them is wrong"
                raise ResultsDiffer(f"{told}: {since}", spoiled)
            case Outcome.NOT_DETERMINISTIC:
                log.warning("rerun_check_interval means nothing from now on: this job's kernels are not deterministic")
                self._turn_off()

    def _turn_off(self) -> None:
        """In this generation all ranks know it; to those of the next one it is told by whoever lives on."""
        self._interval = 0
        self._memory.is_recheck_off = True


@contextmanager
def reproducible() -> Iterator[None]:
    """In the block, torch takes kernels that always give the same bits, where it has such."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each kernel that has no such sister warns
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


@cache
def kind_of(device: torch.device) -> str:
    """What decides which kernels a rank computes with: the device's model and torch's build."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
