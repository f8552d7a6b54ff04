"""How long what Unicron does takes, where the simulator cannot find out by doing it: detection, and a job's transition."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from unicron_lib.domain.failures import DetectionMethod, ErrorKind
from unicron_lib.planning.transition_cost import Bandwidths, Move, StateSource, transition_s
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

_K, _M = ErrorKind, DetectionMethod
METHODS: Mapping[ErrorKind, DetectionMethod] = MappingProxyType(
    {
        _K.NODE_LOST: _M.NODE_HEALTH,
        _K.PREEMPTED: _M.NODE_HEALTH,
        _K.GPU_LOST: _M.NODE_HEALTH,
        _K.PROCESS_EXIT: _M.PROCESS,
        _K.CONNECTION_REFUSED: _M.PROCESS,
        _K.CONNECTION_RESET: _M.PROCESS,
        _K.OUT_OF_MEMORY: _M.PROCESS,
        _K.NCCL_TIMEOUT: _M.STATISTICS,
        _K.LINK_FLAPPING: _M.STATISTICS,
        _K.TASK_HANG: _M.STATISTICS,
        _K.STRAGGLER: _M.STATISTICS,
    }
)
"""What sees a kind first (the Unicron paper, section 3 of its facts); every other kind raises an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Seconds from the fault to the report, by method; the last in mean iterations. The defaults are the paper's."""

    node_health_s: float = 5.6
    process_s: float = 1.8
    exception_s: float = 0.3
    statistics_iterations: float = 3.0


PAPER = Detection()


def method_of(kind: ErrorKind) -> DetectionMethod:
    """What sees this kind of failure first."""
    return METHODS.get(kind, DetectionMethod.EXCEPTION)


def told_as(kind: ErrorKind) -> ErrorKind:
    """As what production hears of a node that is taken away: nobody complains of a preemption, its node is lost."""
    return ErrorKind.NODE_LOST if kind is ErrorKind.PREEMPTED else kind


def detection_s(kind: ErrorKind, iteration_s: float, detection: Detection = PAPER) -> float:
    """Seconds until the failure is reported."""
    match method_of(kind):
        case DetectionMethod.NODE_HEALTH:
            return detection.node_health_s
        case DetectionMethod.PROCESS:
            return detection.process_s
        case DetectionMethod.EXCEPTION:
            return detection.exception_s
        case DetectionMethod.STATISTICS:
            return detection.statistics_iterations * iteration_s


def undetected_s(kind: ErrorKind, cluster: SimCluster) -> float:
    """Seconds without in-band detection: 5.7 for a node that is gone, else until a collective gives up (the paper)."""
    return 5.7 if method_of(kind) is DetectionMethod.NODE_HEALTH else cluster.timeout_s


LINKS = Bandwidths(replica=25e9, peer_memory=25e9, store=20e9)
"""Assumed of the paper's cluster: a whole state moves as fast as one 200 Gbit/s adapter; its store gives 20 GB/s in sum.

The bandwidths of this version of production are `planning.transition_cost.DEFAULT`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What a job's new generation takes.

    `base_s` stops and starts ranks; `in_place_s` is all that a reattempt takes, whose ranks and state live on. The state
    arrives at `bandwidths` from the nearest source, from the object store alone if not `nearest`; with `reuse` only the lost
    part of an iteration is computed again, else half of one.
    """

    base_s: float = 10.0
    in_place_s: float = 2.0
    bandwidths: Bandwidths = LINKS
    nearest: bool = True
    reuse: bool = True

    def source_of(self, job: SimJob, held_gpus: int) -> StateSource:
        """A replica lives on if there was a second one; else the memory of a peer has the newest iteration (GEMINI)."""
        if not self.nearest:
            return StateSource.STORE
        return StateSource.REPLICA if held_gpus >= 2 * job.min_gpus else StateSource.PEER_MEMORY

    def redo_s(self, job: SimJob, source: StateSource, at_s: float) -> float:
        """Work that is done again, in seconds.

        From the object store all since the last save, and jobs save at multiples of `checkpoint_s`; from a peer's memory, which
        has the state of each iteration, half an iteration on average; with a live replica, only what is not reused.
        """
        if source is StateSource.STORE:
            return at_s % job.checkpoint_s
        return 0.0 if self.reuse and source is StateSource.REPLICA else job.iteration_s / 2

    def phases(
        self, job: SimJob, *, at_s: float, held_gpus: int, gpus: int, faulted: bool, in_place: bool
    ) -> tuple[tuple[Use, float], ...]:
        """What the job does until it trains again, each with its seconds, if its transition begins at `at_s`.

        A job that held nothing starts from the object store and has lost nothing; one that is moved in health has all of
        its state, wherever it goes.
        """
        resized = Use.ELASTIC_SCALE_UP if gpus > held_gpus else Use.ELASTIC_SLICE_DOWN
        begins = Use.ELASTIC_REINITIALIZATION if gpus == held_gpus else resized
        if in_place:
            return (
                (begins, self.in_place_s),
                (Use.WASTED_PROGRESS_FROM_DISRUPTION, 0.0 if self.reuse else job.iteration_s / 2),
            )
        source = self.source_of(job, held_gpus) if held_gpus else StateSource.STORE
        loaded = Move(base_s=0.0, state_bytes=job.state_bytes)
        return (
            (begins, self.base_s),
            (Use.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME, transition_s(loaded, source, self.bandwidths)),
            (Use.WASTED_PROGRESS_FROM_DISRUPTION, self.redo_s(job, source, at_s) if held_gpus and faulted else 0.0),
        )

    def believed_s(self, job: SimJob) -> float:
        """What the planner is told of a move of the job, its D_transition: of one with two replicas."""
        source = self.source_of(job, 2 * job.min_gpus)
        redo_s = job.checkpoint_s / 2 if source is StateSource.STORE else self.redo_s(job, source, 0.0)
        return transition_s(Move(base_s=self.base_s, state_bytes=job.state_bytes, redo_s=redo_s), source, self.bandwidths)
