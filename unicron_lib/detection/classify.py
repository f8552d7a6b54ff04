"""From an observation to a failure: what kind, by which of the paper's four methods, with which evidence."""

from dataclasses import replace
from typing import assert_never

from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import GpuFault, NodeNotice, NodeUnreachable, Observation, RankExited, RankResumed, RankStalled
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.detection.exceptions import kind_of_exception, kind_of_text
from unicron_lib.detection.exits import describe, meaning_of
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure

COLLECTIVE = "collective"


def classify(observation: Observation) -> Failure | None:
    """The failure that an observation tells of, None if it tells of none. Its id is the observation's."""
    match observation.body:
        case RankExited() as body:
            return _of_exit(observation, body)
        case RankFailed() as body:
            kind = kind_of_exception(body.error_type, body.message, cause=body.cause, context=body.context)
            failure = _of_rank(observation, body, kind, DetectionMethod.EXCEPTION, _exception_text(body))
            return _in_doubt(failure, body) if body.spoiled else failure
        case NodeUnreachable() as body:
            return _of_node(observation, ErrorKind.NODE_LOST, f"{body.reason}, silent for {body.silent_s:.1f} s")
        case GpuFault() as body:
            return _of_node(observation, ErrorKind(body.kind), body.evidence, symptom=body.symptom)
        case RankStalled() as body:
            kind = ErrorKind.NCCL_TIMEOUT if body.section == COLLECTIVE else ErrorKind.TASK_HANG
            failure = _of_rank(observation, body, kind, DetectionMethod.STATISTICS, _stall_text(body))
            return replace(failure, not_before=observation.at + body.wait_s)
        case RankFinished() | RankResumed() | NodeNotice() | NodeLeaving():
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
    failing = body.iteration + 1
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
        # a rank applies nothing of an iteration whose loss is no number: that one's batch is what did it
        spoiled=(failing, failing) if kind is ErrorKind.LOSS_ANOMALY else None,
    )


def _in_doubt(failure: Failure, body: RankFailed) -> Failure:
    """The rank has reached its last iteration only with results that cannot be trusted."""
    assert body.spoiled is not None
    return replace(failure, iteration=body.spoiled[0] - 1, spoiled=body.spoiled, verdict=body.verdict)


def _stall_text(body: RankStalled) -> str:
    waits = "waits for others in a collective" if body.section == COLLECTIVE else f"has not left the section {body.section}"
    usual = f"; it usually takes {body.usual_s:.2f} s" if body.usual_s else ""
    still = f"; its process does nothing, for {body.still_s:.1f} s now" if body.still_s else ""
    silent = f"for {body.silent_s:.1f} s, allowed are {body.limit_s:.1f} s"
    return f"after iteration {body.iteration} the rank {waits} {silent}{usual}{still}"


def _of_exit(observation: Observation, body: RankExited) -> Failure:
    """By its exit code if that says enough, else by what it has left in its error file, else by its signal."""
    meaning = meaning_of(body.exit_code, out_of_memory=body.out_of_memory)
    text = f"process {body.pid} {describe(body.exit_code)}" + (f": {meaning.text}" if meaning.text else "")
    if body.error:
        text = f"{text}\n{body.error}"
    told = kind_of_text(body.error)
    if meaning.is_final or told is ErrorKind.OTHER:
        failure = _of_rank(observation, body, meaning.kind, DetectionMethod.PROCESS, text)
        return replace(failure, verdict=meaning.verdict)
    return _of_rank(observation, body, told, DetectionMethod.EXCEPTION, text)


def _exception_text(body: RankFailed) -> str:
    """What came first in front; evidence is cut in its middle."""
    causes = (("raised from", body.cause), ("while handling", body.context))
    came_from = "".join(f"\n{how} {what}" for how, what in causes if what)
    return f"{body.error_type}: {body.message}{came_from}\n{body.traceback}"
