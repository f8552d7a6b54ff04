"""The one interface of all policies: the engine tells what happens, the policy says what becomes of the jobs.

class Sleepy:                                     # every job waits an hour after each fault of its node
    name, fitted = "sleepy", ()
    def start(self, cluster, jobs): ...           # a Run
class SleepyRun:
    def begin(self): ...                          # Changes at 0.0: where the jobs start
    def on(self, event, now_s): ...               # Changes from now on
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck:
    """A fault has struck a node that was in use; `cause` names it in the accounts."""

    fault: Fault
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """A node is repaired; `cause` is the fault that had taken it."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrived:
    """A job wants GPUs from now on; those with `arrives_s` 0 are there from the beginning and are not told of."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """A job has done its work; the engine has taken its GPUs."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """The time that the policy had asked for with `Wake`."""


Event = FaultStruck | NodeBack | JobArrived | JobDone | Woken


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `from_s` on (now or later) `job` holds `gpus` healthy GPUs and achieves `flops`, unweighted.

    `use` is what the GPUs do meanwhile, `cause` which fault it is due to ("" if none). It replaces whatever was
    announced of that job for the same time or later: what follows each other is said in the order of time.
    """

    job: str
    gpus: int
    from_s: float
    flops: float
    use: Use = Use.TRAINING
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Tell me `Woken` at `at_s`."""

    at_s: float


Answer = Iterable[Change | Wake]


class Run(Protocol):
    """A policy at work on one cluster."""

    def begin(self) -> Answer:
        """What the jobs hold at time 0.0; all that arrive then are placed and train at once."""
        ...

    def on(self, event: Event, now_s: float) -> Answer:
        """What becomes of the jobs after `event`. What nothing is said of goes on as announced."""
        ...


class Policy(Protocol):
    """How a cluster is managed. `fitted` names the inputs that were fitted to published results, printed beside numbers."""

    @property
    def name(self) -> str:
        """One word for tables."""
        ...

    @property
    def fitted(self) -> tuple[str, ...]:
        """What is no evidence."""
        ...

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> Run:
        """A fresh run."""
        ...
