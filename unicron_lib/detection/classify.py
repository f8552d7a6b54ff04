"""From an observation to a failure: what kind, by which of the paper's four methods, with which evidence."""

import signal
from dataclasses import replace
from typing import assert_never

from unicron_lib.agent.messages import GpuFault, NodeNotice, NodeUnreachable, Observation, RankExited, RankResumed, RankStalled
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.detection.exceptions import kind_of_exception
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure

COLLECTIVE = "collective"
EXIT_KINDS = {16: ErrorKind.CUDA_ERROR, 17: ErrorKind.CUDA_ERROR, 93: ErrorKind.USER_ERROR}
"""Exit codes with a meaning: 16 and 17 are Megatron's result validation, 93 says "do not restart"."""


def classify(observation: Observation) -> Failure | None:
    """The failure that an observation tells of, None if it tells of none. Its id is the observation's."""
    match observation.body:
        case RankExited() as body:
            kind = ErrorKind.OUT_OF_MEMORY if body.out_of_memory else EXIT_KINDS.get(body.exit_code, ErrorKind.PROCESS_EXIT)
            return _of_rank(observation, body, kind, DetectionMethod.PROCESS, _exit_text(body))
        case RankFailed() as body:
            kind = kind_of_exception(body.error_type, body.message)
            text = f"{body.error_type}: {body.message}\n{body.traceback}"
            return _of_rank(observation, body, kind, DetectionMethod.EXCEPTION, text)
        case NodeUnreachable() as body:
            return _of_node(observation, ErrorKind.NODE_LOST, f"{body.reason}, silent for {body.silent_s:.1f} s")
        case GpuFault() as body:
            return _of_node(observation, ErrorKind(body.kind), body.evidence, symptom=body.symptom)
        case RankStalled() as body:
            kind = ErrorKind.NCCL_TIMEOUT if body.section == COLLECTIVE else ErrorKind.TASK_HANG
            failure = _of_rank(observation, body, kind, DetectionMethod.STATISTICS, _stall_text(body))
            return replace(failure, not_before=body.act_at)
        case RankFinished() | RankResumed() | NodeNotice():
            return None
        case _:
            assert_never(observation.body)


def _of_node(observation: Observation, kind: ErrorKind, evidence: str, *, symptom: bool = False) -> Failure:
    return Failure(
        id=observation.id,
        kind=kind,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=observation.at,
        node=observation.node,
        boot=observation.boot,
        evidence=evidence,
        symptom=symptom,
    )


def _of_rank(
    observation: Observation,
    body: RankExited | RankFailed | RankStalled,
    kind: ErrorKind,
    method: DetectionMethod,
    evidence: str,
) -> Failure:
    return Failure(
        id=observation.id,
        kind=kind,
        method=method,
        seen_at=observation.at,
        job=body.job,
        generation=body.generation,
        node=observation.node,
        boot=observation.boot,
        rank=body.rank,
        iteration=body.iteration,
        evidence=evidence,
    )


def _stall_text(body: RankStalled) -> str:
    waits = "waits for others in a collective" if body.section == COLLECTIVE else f"has not left the section {body.section}"
    usual = f"; it usually takes {body.usual_s:.2f} s" if body.usual_s else ""
    return (
        f"after iteration {body.iteration} the rank {waits} for {body.silent_s:.1f} s, allowed are {body.limit_s:.1f} s{usual}"
    )


def _exit_text(body: RankExited) -> str:
    if body.exit_code >= 0:
        return f"process {body.pid} ended with exit code {body.exit_code}"
    try:
        name = signal.Signals(-body.exit_code).name
    except ValueError:
        name = f"signal {-body.exit_code}"
    return f"process {body.pid} was killed by {name}" + (", out of memory" if body.out_of_memory else "")
