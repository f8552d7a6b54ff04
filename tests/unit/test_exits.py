"""Exit codes, signals and error files."""

import json
import os
from pathlib import Path

import pytest

from unicron_lib.agent.error_file import READ_LIMIT_BYTES, leave_error, read_error_file
from unicron_lib.agent.excerpt import TEXT_LIMIT
from unicron_lib.agent.messages import Observation, RankExited
from unicron_lib.detection.classify import classify
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure


def exited(code: int, *, out_of_memory: bool = False, error: str = "") -> Failure:
    body = RankExited(
        job="a", generation=2, rank=1, pid=9, exit_code=code, iteration=4, out_of_memory=out_of_memory, error=error
    )
    failure = classify(Observation(node="node-1", boot="b", seq=3, at=5.0, body=body))
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("code", "kind", "verdict", "words"),
    [
        (1, ErrorKind.PROCESS_EXIT, "", "exit code 1"),
        (3, ErrorKind.PROCESS_EXIT, "", "exit code 3"),
        (16, ErrorKind.CUDA_ERROR, "exclude", "another GPU"),
        (17, ErrorKind.CUDA_ERROR, "exclude_and_stop", "validation failed"),
        (93, ErrorKind.USER_ERROR, "stop", "not to be started again"),
        (-9, ErrorKind.PROCESS_EXIT, "", "SIGKILL"),
        (137, ErrorKind.PROCESS_EXIT, "", "stands for SIGKILL"),
        (-15, ErrorKind.PROCESS_EXIT, "", "not by its agent"),
        (143, ErrorKind.PROCESS_EXIT, "", "stands for SIGTERM"),
        (-6, ErrorKind.PROCESS_EXIT, "", "SIGABRT"),
        (134, ErrorKind.PROCESS_EXIT, "", "SIGABRT"),
        (-11, ErrorKind.PROCESS_EXIT, "", "segmentation fault"),
        (139, ErrorKind.PROCESS_EXIT, "", "segmentation fault"),
        (-7, ErrorKind.PROCESS_EXIT, "", "/dev/shm"),
        (201, ErrorKind.GPU_DRIVER_ERROR, "", "driver"),
        (247, ErrorKind.OUT_OF_MEMORY, "", "memory"),
        (-250, ErrorKind.PROCESS_EXIT, "", "signal 250"),
    ],
)
def test_pb16_exit_codes_and_signals_keep_their_meaning(code: int, kind: ErrorKind, verdict: str, words: str) -> None:
    """PB16: each rank's own code is understood."""
    failure = exited(code)
    assert (failure.kind, failure.verdict, failure.method) == (kind, verdict, DetectionMethod.PROCESS)
    assert words in failure.evidence


@pytest.mark.parametrize("code", [-9, 137, 1])
def test_the_kernel_knows_what_it_has_killed_for_memory(code: int) -> None:
    assert exited(code, out_of_memory=True, error="KeyError: 'x'").kind is ErrorKind.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("code", "kind", "method"),
    [
        (1, ErrorKind.ECC_ERROR, DetectionMethod.EXCEPTION),
        (-6, ErrorKind.ECC_ERROR, DetectionMethod.EXCEPTION),
        (16, ErrorKind.CUDA_ERROR, DetectionMethod.PROCESS),
        (93, ErrorKind.USER_ERROR, DetectionMethod.PROCESS),
    ],
)
def test_an_error_file_says_more_than_a_plain_code(code: int, kind: ErrorKind, method: DetectionMethod) -> None:
    failure = exited(code, error="RuntimeError: CUDA error: uncorrectable ECC error encountered\nTraceback ...")
    assert (failure.kind, failure.method) == (kind, method)
    assert "uncorrectable ECC" in failure.evidence


def test_an_error_that_nobody_knows_stays_the_exit_of_a_process() -> None:
    failure = exited(1, error="something never seen")
    assert (failure.kind, failure.method) == (ErrorKind.PROCESS_EXIT, DetectionMethod.PROCESS)
    assert "something never seen" in failure.evidence


RECORDED = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback (most ...", "timestamp": "1700000000"}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (json.dumps({"message": RECORDED}), "KeyError: 'x'\nTraceback (most ..."),
        (
            json.dumps({"message": "Signal 11 received by PID 7", "errorCode": -11}),
            "Signal 11 received by PID 7",
        ),
        (json.dumps({"message": {"message": "RuntimeError: no"}}), "RuntimeError: no"),
        (json.dumps({"message": {"message": 3, "extraInfo": [1]}}), "3"),
        (json.dumps("only a string"), "only a string"),
        (json.dumps([1, 2]), "[1, 2]"),
        ("no JSON at all\n", "no JSON at all"),
        ('{"message": {"message": "KeyError: torn', "KeyError: torn"),
        ('"\\udcff"', "?"),
        ("[" * 100_000, "["),
        ("", ""),
    ],
)
def test_error_files(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    found = read_error_file(path)
    assert found.startswith(told)
    assert len(found) <= TEXT_LIMIT


def test_a_huge_error_file_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    huge = "x" * (20 * READ_LIMIT_BYTES)
    path.write_text(json.dumps({"message": {"message": f"RuntimeError: {huge}", "extraInfo": {"py_callstack": "the END"}}}))
    found = read_error_file(path)
    assert found.startswith("RuntimeError: xxx")
    assert "the END" in found
    assert len(found) <= TEXT_LIMIT


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert [read_error_file(tmp_path / name) for name in ("fifo", "link", "nothing", ".")] == ["", "", "", ""]
    assert read_error_file(tmp_path / "binary")


def test_what_a_process_leaves_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "e.json"))
    leave_error("KeyError: 'x'", "Traceback")
    assert read_error_file(tmp_path / "e.json") == "KeyError: 'x'\nTraceback"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "e.json"))
    leave_error("KeyError: 'x'", "Traceback")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    leave_error("KeyError: 'x'", "Traceback")


def test_torch_itself_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "e.json"))
    with pytest.raises(KeyError):
        errors.record(lambda: {}["input_ids"])()
    found = read_error_file(tmp_path / "e.json")
    assert found.startswith("KeyError: 'input_ids'\nTraceback")
    assert exited(1, error=found).kind is ErrorKind.USER_ERROR
