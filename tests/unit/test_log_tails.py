"""The end of a log as it travels: bounded, in whole lines, with their numbers."""

import os

import pytest

from unicron_lib.diagnosis import tails
from unicron_lib.diagnosis.tails import PACKED_BYTES, TAIL_BYTES, Tail, packed_tail


@pytest.fixture
def log(tmp_path):
    return tmp_path / "g1-r0.log"


def test_a_short_log_is_sent_whole(log):
    log.write_bytes(b"one\ntwo\nthr")
    tail = packed_tail(log)
    assert (tail.unpacked(), tail.first_line, tail.file) == (b"one\ntwo\nthr", 1, str(log))


def test_an_empty_log_has_nothing_to_say(log):
    log.touch()
    assert packed_tail(log).unpacked() == b""


def test_of_a_long_log_the_end_is_sent_in_whole_lines_with_their_numbers(log):
    lines = [f"line {number} of the log, with some words to make it longer\n".encode() for number in range(1, 50_001)]
    log.write_bytes(b"".join(lines))
    tail = packed_tail(log)
    text = tail.unpacked()
    assert len(text) <= TAIL_BYTES
    assert text == b"".join(lines[tail.first_line - 1 :])


def test_of_what_packs_badly_less_is_sent(log):
    log.write_bytes(os.urandom(3 * TAIL_BYTES) + b"\nRuntimeError: the last line\n")
    tail = packed_tail(log)
    assert len(tail.packed) <= PACKED_BYTES * 4 // 3 + 4
    assert tail.unpacked().endswith(b"RuntimeError: the last line\n")


def test_one_line_without_end_is_cut(log):
    log.write_bytes(b"x" * (2 * TAIL_BYTES))
    assert packed_tail(log).unpacked() == b"x" * TAIL_BYTES


def test_a_huge_log_is_not_read_for_the_sake_of_a_number(log, monkeypatch):
    monkeypatch.setattr(tails, "COUNTED_BYTES", 1 << 10)
    log.write_bytes(b"a line\n" * (TAIL_BYTES // 4))
    assert packed_tail(log).first_line == 0


@pytest.mark.parametrize("packed", ["no base64!", "bm8gemxpYg=="])
def test_a_damaged_end_is_refused(packed):
    with pytest.raises(ValueError, match=r"(?i)base64|damaged"):
        Tail(file="f", packed=packed).unpacked()
