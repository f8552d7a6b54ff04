"""The ledger of a run: who held which GPUs when, for what, and because of what."""

from dataclasses import dataclass, field

from unicron_lib.simulation.policy import Change
from unicron_lib.simulation.uses import Use

NOBODY = ""
"""The job of GPUs that are out of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From `from_s` to `until_s` the job held `gpus` GPUs and achieved `flops`, unweighted; `cause` is a fault, "" if none.

    A job that holds none but waits for some has segments, too.
    """

    job: str
    gpus: int
    from_s: float
    until_s: float
    flops: float
    use: Use
    cause: str

    @property
    def duration_s(self) -> float:
        """How long it lasted."""
        return self.until_s - self.from_s

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of it."""
        return self.gpus * self.duration_s

    @property
    def flop(self) -> float:
        """The work done in it."""
        return self.flops * self.duration_s


@dataclass(slots=True)
class Ledger:
    """Closes a segment whenever something changes; `now` is what holds of each job, `since` the time up to which is closed."""

    closed: list[Segment] = field(default_factory=list)
    now: dict[str, Change] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)

    def turn(self, change: Change, at_s: float) -> None:
        """`change` holds from `at_s` on."""
        self.close(change.job, at_s)
        self.now[change.job] = change
        self.since[change.job] = at_s

    def close(self, job: str, at_s: float) -> None:
        """What holds of the job is written down until `at_s`."""
        change = self.now.get(job)
        if change is None or at_s <= self.since[job]:
            return
        found = Segment(
            job=job,
            gpus=change.gpus,
            from_s=self.since[job],
            until_s=at_s,
            flops=change.flops,
            use=change.use,
            cause=change.cause,
        )
        self.closed.append(found)
        self.work[job] = self.work.get(job, 0.0) + found.flop
        self.since[job] = at_s

    def end(self, job: str, at_s: float) -> int:
        """The job is over; the GPUs that it held."""
        self.close(job, at_s)
        return self.now.pop(job).gpus

    def out_of_use(self, gpus: int, from_s: float, until_s: float, cause: str) -> None:
        """A node was away."""
        if until_s > from_s:
            use = Use.OUT_OF_USE
            self.closed.append(Segment(job=NOBODY, gpus=gpus, from_s=from_s, until_s=until_s, flops=0.0, use=use, cause=cause))
