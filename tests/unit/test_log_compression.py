"""Logs of any size and content: what comes out, what is left out, in how little memory."""

import gzip
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.diagnosis.compress import compress
from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.merge import interesting
from unicron_lib.diagnosis.noise import is_telling, noise_of
from unicron_lib.diagnosis.reading import LINE_BYTES, TEXT_LIMIT, Block, blocks, clean
from unicron_lib.diagnosis.rules import RULES, RuleSet
from unicron_lib.diagnosis.sifting import FIRST_KEPT, PROGRESS_KEPT, Keys, Sifter
from unicron_lib.diagnosis.sightings import is_wanted
from unicron_lib.diagnosis.templates import Kinds, template_of

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
CORPUS = Path(__file__).parents[1] / "diagnosis" / "corpus" / "dev"
NOW = datetime(2024, 5, 2, tzinfo=UTC).timestamp()


def step(number: int, nans: int = 0, loss: str = "2.31E+00") -> str:
    at = f"12:{number // 60 % 60:02}:{number % 60:02}"
    return (
        f" [2024-05-01 {at}] iteration {number:8}/  500000 | consumed samples: {number:12}"
        f" | elapsed time per iteration (ms): 1034.4 | lm loss: {loss} | grad norm: 0.3 | number of nan iterations: {nans:3} |"
    )


NOISE = (
    step(1),
    "gpu-a01:4105:4205 [5] NCCL INFO Channel 07/0 : 5[5] -> 6[6] via P2P/IPC/read",
    "gpu-a01:4105:4205 [5] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file",
    "[2024-05-01 12:00:01,123] [INFO] [logging.py:96:log_dist] [Rank 0] using gradient clipping",
    "2024-05-01 12:00:01,123 - trainer - DEBUG - batch 7 fetched",
    " 37%|███▋      | 370/1000 [12:01<20:11,  1.92s/it, loss=2.31]",
    "  reset_attention_mask ............................ False",
    "node-0:   max_tokens_to_oom ............................... 12000",
    "> building train, validation, and test datasets for GPT ...",
    "    forward-backward ...............................: (1116.05, 1147.94)",
    "{'loss': 2.31, 'grad_norm': 0.4, 'learning_rate': 1e-05, 'epoch': 0.02}",
    '[1477809.2] audit: type=1400 audit(1714557600.64143:0): apparmor="STATUS" profile="docker-default" pid=64143',
    "",
)
SIGNALS = (
    ECC,
    "[1478037.2] NVRM: Xid (PCI:0000:9a:00): 31, pid=140236, name=python3, Ch 00000008",
    "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.02}",
    " 37%|███▋      | 370/1000 [12:01<20:11,  1.92s/it, loss=nan]",
    step(7, loss="NAN"),
    step(7, nans=1),
    "[2024-05-01 12:00:01,123] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4105",
    "gpu-a01:4105:4205 [5] NCCL INFO [Service thread] Connection closed by localRank 5",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "connecting to the rendezvous ........ failed",
    "iterations",
)


def squeezed(text: str) -> str:
    return "".join(it for it in text.lower() if not it.isdigit() and it not in " \t")


def sift(data: bytes | str, *, chunk: int = 1 << 20, name: str = "x.log", wanted: object = None) -> list[Line]:
    raw = data.encode() if isinstance(data, str) else data
    keys = Keys(Kinds(), wanted or (lambda _: False))
    return list(Sifter(name, keys, NOW).sift(blocks(_cut(raw, chunk), chunk)))


def _cut(raw: bytes, chunk: int) -> Iterator[bytes]:
    return (raw[at : at + chunk] for at in range(0, len(raw), chunk))


def numbered(found: list[Block]) -> list[tuple[int, bytes]]:
    return [pair for block in found for pair in zip(block.numbers, block.text.split(b"\n"), strict=True)]


# Reading


@given(st.lists(st.binary(max_size=40).map(lambda it: it.translate(None, b"\r\x1b")), max_size=20), st.integers(1, 64))
def test_every_line_is_read_once_with_its_number_whatever_the_chunks(lines: list[bytes], chunk: int) -> None:
    raw = b"\n".join(lines)
    expected = list(enumerate(raw.split(b"\n"), start=1))
    if expected and not expected[-1][1]:
        expected.pop()
    assert numbered(list(blocks(_cut(raw, chunk)))) == expected


@given(st.binary(max_size=2000), st.integers(1, 300))
def test_any_bytes_can_be_read(raw: bytes, chunk: int) -> None:
    found = list(blocks(_cut(raw, chunk), chunk))
    assert sum(block.num_bytes for block in found) == len(raw)
    numbers = [number for number, _ in numbered(found)]
    assert numbers == sorted(numbers)
    for line in sift(raw, chunk=chunk):
        assert len(line.text) <= TEXT_LIMIT
        assert line.text.isprintable() or "\t" in line.text or not line.text.isascii()


def test_a_line_without_end_costs_no_memory_and_keeps_head_and_tail() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"Traceback of a giant: "
        for _ in range(256):
            yield b"0123456789abcdef" * (1 << 14)
        yield b" " + ECC.encode() + b"\nnext line failed\n"

    tracemalloc.start()
    try:
        found = list(Sifter("x.log", Keys(Kinds(), lambda _: False), NOW).sift(blocks(chunks())))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(line.number, line.text[:9]) for line in found] == [(1, "Traceback"), (2, "next line")]
    assert found[0].text.endswith(ECC)
    assert peak < 100 * LINE_BYTES


def test_memory_does_not_grow_with_the_log() -> None:
    def chunks() -> Iterator[bytes]:
        steps = "".join(f"{step(i)}\n" for i in range(4000)).encode()
        for chunk in range(48):
            odd = (
                f"odd {chr(97 + chunk % 26) * (chunk // 26 + 1)} {chr(97 + i % 26) * (i % 50 + 1)} failed\n" for i in range(200)
            )
            yield steps + "".join(odd).encode()

    tracemalloc.start()
    try:
        kinds = Kinds()
        for _ in Sifter("x.log", Keys(kinds, lambda _: False), NOW).sift(blocks(chunks())):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kinds.num_bytes > 30 << 20
    assert peak < 12 << 20


def test_carriage_returns_part_lines_and_do_not_count() -> None:
    raw = b"a\r\nb 1%\rb 2%\rb 3% failed\nc\r\n"
    assert numbered(list(blocks([raw]))) == [(1, b"a"), (2, b"b 1%"), (2, b"b 2%"), (2, b"b 3% failed"), (3, b"c")]


def test_a_log_of_carriage_returns_only_is_read_in_pieces() -> None:
    bar = b"\r 37%|###   | 370/1000 [12:01<20:11,  1.92s/it]" * 100_000
    (line,) = [it for it in sift(bar + b"\r" + ECC.encode()) if "it]" not in it.text]
    assert (line.number, line.text) == (1, ECC)


def test_colours_titles_and_control_characters_are_no_text() -> None:
    raw = b"\x1b[31;1mRuntimeError\x1b[0m: \x1b]0;title\x07CUDA \0\0error\x07: \xff\xfe broken\x1b[K\n"
    assert [line.text for line in sift(raw)] == ["RuntimeError: CUDA error: \ufffd\ufffd broken"]


def test_an_escape_sequence_that_does_not_end_hides_nothing() -> None:
    assert "RuntimeError: no title" in sift(b"\x1b]0;RuntimeError: no title\n" + b"x\n" * 9)[0].text


def test_binary_data_is_left_out_but_not_what_stands_between(tmp_path: Path) -> None:
    junk = bytes(range(128, 256)) * 3 + b"\n"
    log = tmp_path / "x.log"
    log.write_bytes(junk * 5000 + b"\0" * 5000 + ECC.encode() + b"\n" + junk * 5000)
    assert [line.text for line in interesting([log])] == [ECC]
    assert "10000 of binary data" in compress([log])


def test_words_amid_binary_data_of_their_own_line_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes((b"\xfe\xff" * 100 + ECC.encode() + b"\xfe" * 100 + b"\n") + bytes(range(128, 256)) * 9)
    (line,) = interesting([log])
    assert ECC in line.text


def test_a_language_of_other_letters_is_no_binary_data(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("内存不足 训练失败 请检查显存\n" * 3, encoding="utf-8")
    assert len(list(interesting([log]))) == 3


def test_compressed_logs_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    log = tmp_path / "x.log.gz"
    log.write_bytes(gzip.compress(f"{ECC}\n".encode()) + gzip.compress(b"more failed\n" * 9)[:-9])
    assert next(interesting([log])).text == ECC


def test_a_log_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(interesting([tmp_path / "none.log"]))


# What comes out


@pytest.mark.parametrize("text", NOISE)
def test_noise_is_known(text: str) -> None:
    assert noise_of(text, squeezed(text), telling=is_telling(squeezed(text)))


@pytest.mark.parametrize("text", SIGNALS)
def test_what_tells_of_a_failure_is_no_noise(text: str) -> None:
    lines = [*NOISE, *(step(i) for i in range(50)), text, *(step(i) for i in range(50)), *NOISE]
    found = [line for line in sift("\n".join(lines)) if line.text == text]
    assert [line.number for line in found] == [len(NOISE) + 51]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.example], ids=lambda rule: rule.name)
def test_no_example_of_a_rule_is_left_out(rule) -> None:
    lines = [*NOISE, rule.example, *NOISE]
    assert rule.example in {line.text for line in sift("\n".join(lines), wanted=partial(is_wanted, RuleSet()))}
    if rule.role == "root":
        assert rule.example in {line.text for line in sift("\n".join(lines))}


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.log")), ids=lambda path: path.name)
def test_no_line_of_the_corpus_that_diagnosis_wants_is_left_out(path: Path) -> None:
    wanted = partial(is_wanted, RuleSet())
    lines = enumerate(path.read_bytes().decode().split("\n"), start=1)
    expected = {number for number, text in lines if text and wanted(text)}
    assert expected <= {line.number for line in interesting([path], wanted)}


@pytest.mark.parametrize("case", sorted({path.name.split(".")[0] for path in CORPUS.glob("*.log")}))
def test_what_is_left_out_changes_no_diagnosis(case: str) -> None:
    paths, rules = sorted(CORPUS.glob(f"{case}.*")), RuleSet()
    found = diagnose(interesting(paths, partial(is_wanted, rules)), rules)
    expected = diagnose(interesting(paths, lambda _: True), rules)
    assert (found.verdict, found.kind, found.evidence[:1]) == (expected.verdict, expected.kind, expected.evidence[:1])


@given(st.lists(st.one_of(st.sampled_from(SIGNALS), st.integers(1, 10**6)), max_size=200), st.integers(100, 5000))
def test_few_signals_all_come_out_in_order(content: list[str | int], chunk: int) -> None:
    lines = [step(it) if isinstance(it, int) else it for it in content]
    expected = [(number, text) for number, text in enumerate(lines, start=1) if text in SIGNALS]
    found = [(line.number, line.text) for line in sift("\n".join(lines), chunk=chunk)]
    assert [it for it in found if it[1] in SIGNALS] == expected[: len(expected)]
    assert found == sorted(found)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=1, max_size=40), st.integers(200, 3000))
def test_after_whatever_comes_out_it_can_be_told_that_the_job_goes_on(runs: list[tuple[bool, int]], chunk: int) -> None:
    lines = [text for fails, steps in runs for text in [ECC] * fails + [step(i) for i in range(steps)]]
    found = sift("\n".join(lines), chunk=chunk)
    for line in found:
        if line.text == ECC:
            behind = sum(text != ECC for text in lines[line.number :])
            seen = sum(it.text != ECC for it in found if it.number > line.number)
            assert min(behind, PROGRESS_KEPT - 1) <= seen <= behind
    assert not lines or found[-1].number == len(lines)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(500, 50_000))
def test_what_is_said_over_and_over_comes_out_first_and_last_and_with_each_new_code(
    before: int, after: int, chunk: int
) -> None:
    xid = "NVRM: Xid (PCI:0000:9a:00): {}, pid=140236"
    lines = [xid.format(31)] * before + [xid.format(79)] + [xid.format(31)] * after
    numbers = [line.number for line in sift("\n".join(lines), chunk=chunk)]
    assert before + 1 in numbers
    assert len(lines) in numbers
    assert set(range(1, min(FIRST_KEPT, len(lines)) + 1)) <= set(numbers)
    assert len(numbers) <= FIRST_KEPT + 4


def test_a_large_log_of_one_warning_is_a_few_lines() -> None:
    lines = sift("".join(f"WARNING: slow collective, {1000 + i} ms over\n{step(i)}\n" for i in range(20_000)))
    assert len(lines) < 20 * FIRST_KEPT
    assert lines[-2].text == "WARNING: slow collective, 20999 ms over"


def test_steps_with_a_count_of_nans_come_out_and_others_like_them_do_not() -> None:
    text = "\n".join(step(i, nans=int(i == 700)) for i in range(1000))
    assert [line.number for line in sift(text) if "iterations:   1" in line.text] == [701]
    assert len(sift(text)) < 20


@pytest.mark.parametrize(
    "text",
    [
        *("1" * 50_000, "a " * 25_000, "." * 50_000, "/" * 50_000, "/a" * 25_000, "a.b-c_" * 9000, "[" * 50_000, "-" * 50_000),
        *("a:" * 25_000, "step 1 " * 8000, "iteration 1/ " * 4000, "NCCL INFO [" * 5000, "{a" * 25_000, "a .... " * 8000),
        *(
            "0x" * 25_000,
            "1.1.1." * 9000,
            "2024-05-01 " * 5000,
            "12:00:00" * 7000,
            "\x1b[" * 25_000,
            "\x1b]" * 25_000,
            "w " * 9 + "." * 9000,
        ),
    ],
    ids=lambda text: text[:12],
)
def test_no_line_takes_more_than_a_moment(text: str) -> None:
    """A pattern that looks at a line in more than linear time would take minutes or forever here."""
    for line in (text, text + "!", f"{text} failed"):
        sift(line)
        template_of(line)
        noise_of(clean(line.encode()), squeezed(line), telling=False)
