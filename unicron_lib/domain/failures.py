"""Kinds of failure, their severities, and which of them are usually another one's echo."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Literal

EVIDENCE_LIMIT = 4096
"""Characters of evidence that a failure carries at most; the full text stays in the rank's log."""


class Severity(IntEnum):
    """How much has to change: SEV1 drains a node, SEV2 restarts a process, SEV3 tries again in place."""

    SEV1 = 1
    SEV2 = 2
    SEV3 = 3


class DetectionMethod(StrEnum):
    """The paper's four in-band methods (section 4)."""

    NODE_HEALTH = "node_health"
    PROCESS = "process_supervision"
    EXCEPTION = "exception_propagation"
    STATISTICS = "statistical_monitoring"


class ErrorKind(StrEnum):
    """What went wrong; spelled so in events, YAML, JSON and metrics."""

    NODE_LOST = "node_lost"
    PROCESS_EXIT = "process_exit"
    TASK_HANG = "task_hang"
    STRAGGLER = "straggler"
    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    ECC_ERROR = "ecc_error"
    INVALID_DMA_MAPPING = "invalid_dma_mapping"
    CUDA_ERROR = "cuda_error"
    NVLINK_ERROR = "nvlink_error"
    GPU_DRIVER_ERROR = "gpu_driver_error"
    GPU_LOST = "gpu_lost"
    NCCL_TIMEOUT = "nccl_timeout"
    NCCL_REMOTE_ERROR = "nccl_remote_error"
    CONNECTION_REFUSED = "connection_refused"
    CONNECTION_RESET = "connection_reset"
    LINK_FLAPPING = "link_flapping"
    NETWORK_ERROR = "network_error"
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE_ERROR = "storage_error"
    DATALOADER_ERROR = "dataloader_error"
    LOSS_ANOMALY = "loss_anomaly"
    USER_ERROR = "user_error"
    PREEMPTED = "preempted"
    OTHER = "other"


def severity_name(severity: Severity | None) -> str:
    """`SEV2`, or a dash for planned changes."""
    return severity.name if severity is not None else "-"


_K, _S = ErrorKind, Severity
DEFAULT_SEVERITY: Mapping[ErrorKind, Severity] = MappingProxyType(
    {
        _K.NODE_LOST: _S.SEV1,
        _K.ECC_ERROR: _S.SEV1,
        _K.INVALID_DMA_MAPPING: _S.SEV1,
        _K.NVLINK_ERROR: _S.SEV1,
        _K.GPU_DRIVER_ERROR: _S.SEV1,
        _K.GPU_LOST: _S.SEV1,
        _K.PREEMPTED: _S.SEV1,
        _K.PROCESS_EXIT: _S.SEV2,
        _K.TASK_HANG: _S.SEV2,
        _K.ILLEGAL_MEMORY_ACCESS: _S.SEV2,
        _K.CUDA_ERROR: _S.SEV2,
        _K.OUT_OF_MEMORY: _S.SEV2,
        _K.DATALOADER_ERROR: _S.SEV2,
        _K.USER_ERROR: _S.SEV2,
        _K.OTHER: _S.SEV2,
        _K.NCCL_TIMEOUT: _S.SEV3,
        _K.NCCL_REMOTE_ERROR: _S.SEV3,
        _K.CONNECTION_REFUSED: _S.SEV3,
        _K.CONNECTION_RESET: _S.SEV3,
        _K.LINK_FLAPPING: _S.SEV3,
        _K.NETWORK_ERROR: _S.SEV3,
        _K.STORAGE_ERROR: _S.SEV3,
        _K.STRAGGLER: _S.SEV3,
        _K.LOSS_ANOMALY: _S.SEV3,
    }
)
"""Severities of the paper and, where it is silent, ours: GPU_LOST, OUT_OF_MEMORY, STORAGE_ERROR and the last two rows."""

ECHOES = frozenset({_K.NCCL_TIMEOUT, _K.NCCL_REMOTE_ERROR, _K.CONNECTION_REFUSED, _K.CONNECTION_RESET, _K.NETWORK_ERROR})
"""Kinds that the peers of a failed rank report: they name a root cause only when nothing better arrives."""

BLAMELESS = frozenset(
    {
        *(_K.LOSS_ANOMALY, _K.STORAGE_ERROR, _K.DATALOADER_ERROR, _K.OUT_OF_MEMORY, _K.USER_ERROR, _K.STRAGGLER),
        _K.PREEMPTED,
    }
)
"""Kinds for which no node is isolated, however often they come back."""

EVIDENCE = BLAMELESS | {_K.LINK_FLAPPING}
"""Kinds that, told of a node, explain what its ranks complain about, but call for nothing while no rank complains."""

STALLS = frozenset({_K.TASK_HANG, _K.NCCL_TIMEOUT})
"""Kinds that a rank which stands still is told as: outside a collective, or in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something seen and classified.

    `id` derives from the observation, so that the same one reported twice is one failure.
    `seen_at` is the observer's wall clock in epoch seconds, `boot` names one life of `node`. A `symptom` explains nothing
    by itself. Until `not_before` (epoch seconds) it may pass by itself, and nothing is done about it. `verdict` is what the
    process itself asked for: another node, another node and no new start, no new start. `spoiled` are the first and the last
    iteration that are not to be gone on from: their batches are thought to have done it, if the loss went wrong; of any other
    kind it is their results, which some rank has computed wrongly.
    """

    id: str
    kind: ErrorKind
    method: DetectionMethod
    seen_at: float
    job: str | None = None
    generation: int | None = None
    node: str | None = None
    boot: str | None = None
    rank: int | None = None
    iteration: int | None = None
    evidence: str = ""
    symptom: bool = False
    not_before: float = 0.0
    verdict: Literal["", "exclude", "exclude_and_stop", "stop"] = ""
    spoiled: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.evidence) > EVIDENCE_LIMIT:
            half = EVIDENCE_LIMIT // 2 - 8
            object.__setattr__(self, "evidence", f"{self.evidence[:half]}\n [...]\n{self.evidence[-half:]}")

    @property
    def severity(self) -> Severity:
        """SEV1 for a node's broken hardware and for a verdict, else the kind's; escalation is the recovery's business."""
        of_node = self.job is None and not self.symptom and self.kind not in EVIDENCE
        return Severity.SEV1 if of_node or self.verdict else DEFAULT_SEVERITY[self.kind]

    @property
    def is_echo(self) -> bool:
        """Whether this is what a peer of the really failed rank would report, or another consequence of something else."""
        return self.symptom or self.kind in ECHOES

    @property
    def is_stall(self) -> bool:
        """Whether a rank merely stands still, as its pace tells: it may go on by itself."""
        return self.job is not None and self.kind in STALLS and self.method is DetectionMethod.STATISTICS

    @property
    def is_last_word(self) -> bool:
        """Whether the answer is the end of the job, which nothing that is learned later undoes."""
        return self.job is not None and (self.kind is ErrorKind.USER_ERROR or self.verdict in {"stop", "exclude_and_stop"})

    @property
    def weight(self) -> tuple[int, Severity, bool, bool]:
        """Of several failures, those of the least weight explain the others.

        Causes come before a flapping link, that before what peers report, and mere symptoms last; then the graver, what is
        certain before what may pass, and the node's word on hardware and the rank's on the rest.
        """
        is_link = self.job is None and self.kind is ErrorKind.LINK_FLAPPING
        rank = 0 if not self.is_echo else 1 if is_link else 3 if self.symptom else 2
        foreign = (self.job is None) is not (self.severity is Severity.SEV1)
        return rank, self.severity, bool(self.not_before) and self.not_before > self.seen_at, foreign


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure that explains the others; they are in the order in which the journal took them.

    Of those of the least weight, the node that was heard first has it; of what that node tells, the earliest. The clocks of
    two nodes are never compared.
    """
    least = min((failure.weight for failure in failures), default=None)
    likely = [failure for failure in failures if failure.weight == least]
    first = [failure for failure in likely if failure.node == likely[0].node]
    return min(first, key=lambda failure: (failure.seen_at, failure.id), default=None)
