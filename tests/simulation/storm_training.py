"""The training of a storm: ranks that learn from numbered batches, some of which are poisoned, and the guard of the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from storm_kernel import HostClock, Kernel, Work
from storm_node import ECHO, Node, Rank
from storm_store import Store
from storm_witness import Broken

from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.controller.liveness import Stepping
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.skipping import batch_of
from unicron_lib.errors import IllegalTransition, StoreError
from unicron_lib.journal import Journal

ITERATION_S, SAVE_INTERVAL = 0.5, 8
SHORT, SHORT_ITERS = "c", 60
"""The job that comes to its end within a storm, if nothing holds it up for long."""
NOTICED_AFTER = 3
"""Iterations until a wrong loss stands out."""
NO_NUMBER = ("FloatingPointError", "the loss is nan")
Member = tuple[Node, int, Rank]


@dataclass(eq=False)
class Training:
    """`deadly` batches make the loss no number; from `wrong` ones the parameters learn something that stands out later.

    The ranks of a job in `cursed` die before their first iteration.
    """

    kernel: Kernel
    store: Store
    nodes: dict[str, Node]
    steps: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    learned: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    deadly: dict[str, set[int]] = field(default_factory=dict)
    wrong: dict[str, set[int]] = field(default_factory=dict)
    cursed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clock = HostClock(self.kernel)
        self.kernel.start("training", self._work())
        self.kernel.start("guard", self._watch(Journal(self.store)))

    def ranks(self) -> Iterator[Member]:
        for node in self.nodes.values():
            for gpu, rank in list(node.gpus.items()):
                if rank.phase != "dead":
                    yield node, gpu, rank

    def progress(self, job: str, generation: int) -> int | None:
        """The last iteration of all ranks of a generation, None before the first."""
        return self.steps.get((job, generation), (None, 0.0))[0]

    def trains(self, job: str, generation: int) -> bool:
        """Whether it has made an iteration lately."""
        _, at = self.steps.get((job, generation), (0, -1e9))
        return self.kernel.now - at < 2.0

    def stepping(self, name: str) -> Stepping | None:
        """What ranks elsewhere have lately done together with those of a node that cannot be heard."""
        found = {(rank.job, rank.generation) for _, rank in self.nodes[name].gpus.items()}
        for job, generation in sorted(found):
            iteration, at = self.steps.get((job, generation), (0, -1e9))
            others = [n.name for n, _, r in self.ranks() if r.job == job and n.name != name and n.link]
            if others:
                return Stepping(job=job, iteration=iteration, reporter=others[0], at=at)
        return None

    def poison(self, job: str, *, deadly: bool) -> None:
        """One of the next batches of a job, far enough from others: what goes wrong twice at one place ends a job."""
        ahead = max((batches[-1] for (name, _), batches in self.learned.items() if name == job and batches), default=0)
        bad = self.deadly.get(job, set()) | self.wrong.get(job, set())
        batch = max(ahead + self.kernel.rng.randint(1, 8), max(bad, default=-1) + 4 * NOTICED_AFTER)
        (self.deadly if deadly else self.wrong).setdefault(job, set()).add(batch)

    def harm_within(self, job: str, generation: int) -> int | None:
        """The iteration that has learned from a wrong batch."""
        batches, wrong = self.learned.get((job, generation), ()), self.wrong.get(job, set())
        return next((number for number, batch in enumerate(batches) if batch in wrong), None)

    def _work(self) -> Work:
        while True:
            yield ITERATION_S
            groups: dict[tuple[str, int], list[Member]] = {}
            for node, gpu, rank in self.ranks():
                if gpu in node.broken or rank.job in self.cursed:
                    node.die(gpu, 1)
                else:
                    groups.setdefault((rank.job, rank.generation), []).append((node, gpu, rank))
            for (job, generation), members in groups.items():
                self._iterate(job, generation, members)

    def _iterate(self, job: str, generation: int, members: list[Member]) -> None:
        whole = len(members) == members[0][2].world_size
        if whole and all(rank.phase == "running" for _, _, rank in members):
            batches = _together(job, [rank for _, _, rank in members])
            batch = batch_of(len(batches), members[0][2].skipped)
            if batch in self.deadly.get(job, ()):
                for node, gpu, rank in members:
                    rank.batches = batches
                    node.fail(gpu, *NO_NUMBER)
                return
            self._learn(job, generation, (*batches, batch), members)
        elif (job, generation) in self.steps:  # a peer is gone: who waits for it is told so, sooner or later
            for node, gpu, rank in members:
                if rank.phase == "running" and not whole and self.kernel.rng.random() < 0.5:
                    node.fail(gpu, *ECHO)

    def _learn(self, job: str, generation: int, batches: tuple[int, ...], members: list[Member]) -> None:
        iteration, skipped = len(batches) - 1, members[0][2].skipped
        is_over = generation < self.store.witness.begins_with[job]  # it was begun for a submission that has ended meanwhile
        if iteration and not is_over and batch_of(iteration - 1, skipped) != batches[-2]:
            raise Broken(f"{job} generation {generation} reads {batches[-1]} after {batches[-2]}, leaving out {skipped}")
        for _, _, rank in members:
            rank.batches, rank.has_stepped = batches, True
        self.learned[job, generation] = batches
        self.steps[job, generation] = iteration, self.kernel.now
        if iteration % SAVE_INTERVAL == 0:
            self.store.save(job, generation, batches)
        if job == SHORT and iteration >= SHORT_ITERS - 1:
            self._finish(members)

    def _finish(self, members: list[Member]) -> None:
        for node, _, rank in members:
            it = {"job": rank.job, "generation": rank.generation, "rank": rank.rank, "iteration": rank.iteration}
            rank.phase = "dead"
            node.observe(RankFinished(**it, loss=1.0))

    def _watch(self, journal: Journal) -> Work:
        """The guard of the loss, which sees what generations that live have learned."""
        while True:
            yield 1.0
            try:
                jobs = journal.refresh().jobs
                for name, job in jobs.items():
                    first = self.harm_within(name, job.generation)
                    last = len(self.learned.get((name, job.generation), ())) - 1
                    if first is not None and last >= first + NOTICED_AFTER and job.wants_gpus:
                        self._report(journal, name, job.generation, (first, last))
            except (StoreError, IllegalTransition):
                continue

    def _report(self, journal: Journal, job: str, generation: int, spoiled: tuple[int, int]) -> None:
        failure = Failure(
            id=f"loss/{job}/{generation}/{spoiled[0]}",
            kind=ErrorKind.LOSS_ANOMALY,
            method=DetectionMethod.STATISTICS,
            seen_at=self.clock(),
            job=job,
            generation=generation,
            iteration=spoiled[1],
            evidence="the loss has left what it was",
            spoiled=spoiled,
        )
        journal.append(FailureDetected(id=failure.id, at=self.clock(), failure=failure))


def _together(job: str, ranks: list[Rank]) -> tuple[int, ...]:
    """What all have learned, once who is behind has copied the state. Raises Broken if they are not of one history."""
    best = max((rank.batches for rank in ranks), key=len)
    for rank in ranks:
        if rank.batches is not best and rank.batches != best[: len(rank.batches)]:
            raise Broken(f"ranks of {job} have learned from other batches: {rank.batches[-5:]} and {best[-5:]}")
    return best
