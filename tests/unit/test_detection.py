"""From observations to kinds of failure."""

import pytest

from unicron_lib.agent.messages import GpuFault, NodeUnreachable, Observation, RankExited
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.detection.classify import classify
from unicron_lib.detection.exceptions import kind_of_exception
from unicron_lib.domain.failures import EVIDENCE_LIMIT, DetectionMethod, ErrorKind, Severity


def observed(body):
    return Observation(node="node-1", boot="b", seq=3, at=5.0, body=body)


def exited(code, *, oom=False):
    body = RankExited(job="a", generation=2, rank=1, pid=9, exit_code=code, iteration=4, out_of_memory=oom)
    return classify(observed(body))


def test_a_killed_rank_names_the_signal():
    failure = exited(-9)
    assert (failure.kind, failure.method) == (ErrorKind.PROCESS_EXIT, DetectionMethod.PROCESS)
    assert "SIGKILL" in failure.evidence
    assert (failure.job, failure.generation, failure.rank, failure.node, failure.iteration) == ("a", 2, 1, "node-1", 4)


@pytest.mark.parametrize(
    ("code", "oom", "kind"),
    [
        (1, False, ErrorKind.PROCESS_EXIT),
        (-9, True, ErrorKind.OUT_OF_MEMORY),
        (17, False, ErrorKind.CUDA_ERROR),
        (93, False, ErrorKind.USER_ERROR),
        (-250, False, ErrorKind.PROCESS_EXIT),
    ],
)
def test_exit_codes(code, oom, kind):
    assert exited(code, oom=oom).kind is kind


REAL_MESSAGES = [
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", ErrorKind.ECC_ERROR),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", ErrorKind.ILLEGAL_MEMORY_ACCESS),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", ErrorKind.OUT_OF_MEMORY),
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22236",
        ErrorKind.CONNECTION_RESET,
    ),
    (
        "RuntimeError",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
        ErrorKind.NCCL_TIMEOUT,
    ),
    ("DistBackendError", "NCCL error: remote process exited or there was a network error", ErrorKind.NCCL_REMOTE_ERROR),
    ("DistNetworkError", "The client socket has failed to connect: Connection refused", ErrorKind.CONNECTION_REFUSED),
    ("RuntimeError", "CUDA error: device-side assert triggered", ErrorKind.CUDA_ERROR),
    ("StoreError", "s3://bucket/x refused 'k': SlowDown", ErrorKind.STORAGE_ERROR),
    ("KeyError", "'input_ids'", ErrorKind.USER_ERROR),
    ("RuntimeError", "something never seen", ErrorKind.OTHER),
]


@pytest.mark.parametrize(("error_type", "message", "kind"), REAL_MESSAGES)
def test_exceptions(error_type, message, kind):
    assert kind_of_exception(error_type, message) is kind


def test_a_huge_traceback_is_bounded_with_head_and_tail():
    body = RankFailed(
        job="a",
        generation=1,
        rank=0,
        iteration=3,
        error_type="RuntimeError",
        message="HEAD",
        traceback="x" * 10**6 + "TAIL",
        parked=False,
    )
    evidence = classify(observed(body)).evidence
    assert len(evidence) <= EVIDENCE_LIMIT
    assert "HEAD" in evidence
    assert evidence.endswith("TAIL")


def test_a_silent_node_is_lost_and_a_finished_rank_is_no_failure():
    lost = classify(observed(NodeUnreachable(silent_s=5.2, reason="connection closed", jobs=("a",))))
    assert (lost.kind, lost.job, lost.boot) == (ErrorKind.NODE_LOST, None, "b")
    assert classify(observed(RankFinished(job="a", generation=1, rank=0, iteration=9, loss=1.0))) is None


@pytest.mark.parametrize("kind", ["ecc_error", "gpu_lost", "nvlink_error", "gpu_driver_error"])
def test_a_broken_gpu_is_the_failure_of_its_node(kind):
    failure = classify(observed(GpuFault(kind=kind, gpu=3, uuid="GPU-3", evidence="GPU 3 (GPU-3) is lost", jobs=("a",))))
    assert (failure.kind, failure.severity, failure.method) == (kind, Severity.SEV1, DetectionMethod.NODE_HEALTH)
    assert (failure.job, failure.rank, failure.node, failure.boot) == (None, None, "node-1", "b")
    assert failure.evidence == "GPU 3 (GPU-3) is lost"
