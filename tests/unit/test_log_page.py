"""Times and ranks that logs tell, several logs as one, and the page that is made of them."""

import re
import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest

from unicron_lib.diagnosis.compress import compress
from unicron_lib.diagnosis.merge import interesting
from unicron_lib.diagnosis.noise import TELLING
from unicron_lib.diagnosis.templates import MAX_KINDS, Kinds, template_of
from unicron_lib.diagnosis.times import rank_of_file, rank_of_line, reference_time, time_of

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
NOW = datetime(2024, 5, 2, tzinfo=UTC).timestamp()


# Times and ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-01T12:00:37.5Z stdout F x", "2024-05-01T12:00:37.500"),
        ("2024-05-01T14:00:37+02:00 x", "2024-05-01T12:00:37"),
        ("2024-05-01 12:00:37,250 - root - INFO - x", "2024-05-01T12:00:37.250"),
        (" [2024-05-01 12:00:37] iteration 1/ 2", "2024-05-01T12:00:37"),
        ("[2024-05-01 12:00:37,619] [INFO] [launch.py:1]", "2024-05-01T12:00:37.619"),
        ("[rank3]:[E501 12:00:37.123456000 ProcessGroupNCCL.cpp:616] x", "2024-05-01T12:00:37.123456"),
        ("[rank3]:[E0501 12:00:37.125000000 ProcessGroupNCCL.cpp:616] x", "2024-05-01T12:00:37.125"),
        ("W0501 12:00:37.125000 140201 torch/distributed/run.py:757]", "2024-05-01T12:00:37.125"),
        ("E20240501 12:00:37 1 x.cc:1]", "2024-05-01T12:00:37"),
        ("[2024-05-01 12:00:37] gpu-a01:1:2 [0] NCCL WARN x", "2024-05-01T12:00:37"),
        ("May  1 12:00:37 gpu-a01 kernel: NVRM: x", "2024-05-01T12:00:37"),
        ("[Wed May  1 12:00:37 2024] NVRM: Xid", "2024-05-01T12:00:37"),
        ("[after megatron is initialized] datetime: 2024-05-01 12:00:37 ", "2024-05-01T12:00:37"),
        ("Dec 31 23:59:59 gpu-a01 kernel: x", "2023-12-31T23:59:59"),
        ("2024/05/01 12:00:37 x", "2024-05-01T12:00:37"),
        ("[1477635.000000] nvidia-nvlink: x", None),
        ("2024-13-41 12:00:37 x", None),
        ("2024-05-01 25:61:61 x", None),
        ("took 12:00:37", None),
    ],
)
def test_times_are_read(text: str, expected: str | None) -> None:
    reference = datetime(2024, 1 if "Dec" in text else 5, 2, tzinfo=UTC).timestamp()
    found = time_of(text, reference)
    assert found == (datetime.fromisoformat(f"{expected}+00:00").timestamp() if expected else None)


def test_a_time_without_a_year_is_of_the_year_of_the_other_logs() -> None:
    assert reference_time(["no time", "x\n[2021-03-01 00:00:00] y"], NOW) == datetime(2021, 3, 1, tzinfo=UTC).timestamp()
    assert reference_time(["no time"], NOW) == NOW


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("g3-r5.log", 5),
        ("job.rank12.log", 12),
        ("rank_3.err", 3),
        ("d002.rank5.log", 5),
        ("worker.log", None),
        ("r2d2.log", None),
    ],
)
def test_ranks_of_files(name: str, rank: int | None) -> None:
    assert rank_of_file(f"/logs/r7/{name}") == rank


@pytest.mark.parametrize(("text", "rank"), [("[rank5]: x", 5), ("[E x.cpp:1] [Rank 12] Watchdog", 12), ("rank 5 said", None)])
def test_ranks_of_lines(text: str, rank: int | None) -> None:
    assert rank_of_line(text) == rank


# Several logs


def test_logs_are_merged_in_time_and_lines_without_a_time_stay_with_the_one_before(tmp_path: Path) -> None:
    contents = {
        "g1-r1.log": "2024-05-01 12:00:02 failed b\n  lost detail of b\n2024-05-01 12:00:05 failed d",
        "g1-r0.log": "2024-05-01 12:00:01 failed a\n2024-05-01 12:00:03 [INFO] nothing\n  lost detail of nothing",
        "dmesg.log": "[17.5] NVRM: failed 1\n[18.5] NVRM: failed 2",
        "syslog.log": "May  1 12:00:04 host kernel: failed c",
    }
    paths = []
    for name, content in contents.items():
        paths.append(tmp_path / name)
        paths[-1].write_text(content)
    found = [(line.rank, re.split("failed |detail ", line.text)[-1]) for line in interesting(paths)]
    assert [text for _, text in found] == ["1", "2", "a", "b", "of b", "of nothing", "c", "d"]
    assert [rank for rank, _ in found] == [None, None, 0, 1, 1, 0, None, 1]


def test_more_logs_than_a_process_may_have_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"g0-r{rank}.log" for rank in range(300)]
    for rank, path in enumerate(paths):
        path.write_text(f"2024-05-01 12:00:01 hello failed\n[rank{rank}]: {ECC}\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 150, hard))
    try:
        found = list(interesting(paths))
        page = compress(paths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {line.rank for line in found if ECC in line.text} == set(range(300))
    assert page.count("\n") < 10
    assert "x300" in page
    assert "r0 r1 r2 r3 r4 r5 and 294 more" in page


# The page


def test_a_large_log_is_a_page(tmp_path: Path) -> None:
    log = tmp_path / "g0-r3.log"
    odd = [f"{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]} finished part {'uvwxyz'[i // 100 % 6]}" for i in range(600)]
    steps = [f" iteration {i:8}/  500000 | lm loss: 2.31E+00 | grad norm: 0.3 |" for i in range(3000)]
    log.write_text("\n".join([*odd, *steps, *[ECC] * 1500, "Killed"]))
    page = compress([log], max_lines=60).splitlines()
    assert len(page) <= 60
    assert page[0].startswith("1 logs, ")
    assert "5101 lines" in page[0]
    assert any(f"x1500, last g0-r3.log:5100  {ECC}" in row for row in page)
    assert page[-1].startswith("and ")
    assert any("finished part" in row for row in page)


def test_kinds_of_lines_are_bounded_and_no_line_is_uncounted() -> None:
    kinds = Kinds()
    for i in range(3 * MAX_KINDS):
        text = "".join(chr(97 + int(digit)) for digit in str(i))
        kinds.of(text, noise=None, telling=i % 2 == 0).add(1, ("x", i), "x")
    assert len(kinds.told) <= MAX_KINDS * 3 // 2 + 2
    assert kinds.num_lines == 3 * MAX_KINDS


def test_templates_hide_what_changes() -> None:
    one = "2024-05-01 12:00:01 worker 12 at 0x7f3a, 10.0.0.7:29500 wrote /ckpt/run7/iter_001 of deadbeef01 in 1.5e-3 s"
    two = "2024-06-11 02:10:31 worker 3 at 0xbeef, 10.0.1.8:29501 wrote /ckpt/run7/iter_199 of 0123456789 in 27 s"
    assert template_of(one) == template_of(two)
    assert template_of(one) != template_of(one.replace("wrote", "read"))


def test_telling_words_are_squeezed() -> None:
    assert [word for word in TELLING if word != word.lower() or re.search(r"[\s\d]", word)] == []
