"""Lines that a rank leaves for its agent in memory: each arrives once, whole, in its order, whoever dies meanwhile."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_progress_lines import ENV

from unicron_lib.agent.left_lines import RING, LineReader, LineWriter, lines_path
from unicron_lib.agent.rank_messages import Progress, RankHello, from_rank
from unicron_lib.agent.rank_socket import RankSocket
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.training.progress_lines import LOOK, ProgressLines

WHO = {"job": ENV.job, "generation": ENV.generation, "rank": ENV.rank}


@contextmanager
def ring():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        writer, reader = LineWriter(path), LineReader(path)
        yield writer, reader
        reader.close()


@given(st.lists(st.one_of(st.none(), st.integers(0, RING // 2)), max_size=60))
def test_every_line_that_found_room_is_read_once_in_its_order(events):
    """An event is a line's length, or a look."""
    with ring() as (writer, reader):
        left, read, is_full = [], [], False
        for number, length in enumerate(events):
            if length is None:
                read += reader.read()
                continue
            line = bytes([number]) * length
            if writer.leave(line):
                assert not is_full
                left.append(line)
            else:
                is_full = True
        assert read + reader.read() == left


def test_a_line_that_finds_no_room_ends_it_for_no_later_one_may_overtake_it():
    with ring() as (writer, reader):
        line = bytes(1000)
        while writer.leave(line):
            pass
        assert len(reader.read()) == RING // (1000 + 8)
        assert not writer.leave(b"later")


def test_a_line_that_is_not_all_there_yet_is_read_the_next_time():
    with ring() as (writer, reader):
        writer.leave(b"first")
        writer.leave(b"second")
        last = writer._page[16 + 13 + 8]
        writer._page[16 + 13 + 8] = 0  # as if another processor did not see it yet
        assert reader.read() == [b"first"]
        assert reader.read() == []
        writer._page[16 + 13 + 8] = last
        assert reader.read() == [b"second"]


def test_garbage_in_the_counts_is_nothing_to_read():
    with ring() as (writer, reader):
        writer._page[0:8] = b"\xfe" * 8
        assert reader.read() == []


def test_a_ring_has_one_writer_and_a_rank_without_one_sends(tmp_path, caplog):
    assert LineWriter.open(None) is None
    assert LineWriter.open(tmp_path / "lines") is not None
    assert LineWriter.open(tmp_path / "lines") is None
    assert "every line is sent" in caplog.text
    with pytest.raises(FileNotFoundError):
        LineReader(tmp_path / "nobody")
    (tmp_path / "young").touch()
    with pytest.raises(FileNotFoundError):
        LineReader(tmp_path / "young")


WRITER = """
import sys
from pathlib import Path
from unicron_lib.agent.left_lines import LineWriter
writer, number = LineWriter(Path(sys.argv[1])), 0
while True:
    if not writer.leave(b"%d|" % number + bytes(number % 777)):
        writer._is_full = False
        continue
    number += 1
"""


def test_another_process_that_writes_as_fast_as_it_can_is_read_whole_to_its_death(tmp_path):
    path, seen, deadline = tmp_path / "lines", 0, time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, path]) as process:
        reader = None
        while seen < 20_000:
            assert time.monotonic() < deadline
            with suppress(FileNotFoundError):
                reader = reader or LineReader(path)
            for line in reader.read() if reader else ():
                number, _, rest = line.partition(b"|")
                assert (int(number), rest) == (seen, bytes(seen % 777))
                seen += 1
        process.kill()
        process.wait()
        number = seen
        for line in reader.read():
            assert int(line.partition(b"|")[0]) == number
            number += 1


# --- a rank's progress, and its agent ---------------------------------------------------------------------------------


class Told:
    """What the template's lines say, and what went over the socket."""

    def __init__(self, path, monkeypatch):
        self.sent, self.now = [], 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.progress = ProgressLines(replace(ENV, lines_file=path), self.sent.append)
        self.reader = LineReader(path) if path else None

    def iterate(self, iteration, seconds):
        self.now += seconds
        self.progress.tell(iteration, loss=1.0, iteration_s=seconds, flops=1.0)

    def left(self):
        return [from_rank.validate_json(line).iteration for line in self.reader.read()]


def test_the_agent_is_woken_for_the_first_iteration_and_for_long_ones(tmp_path, monkeypatch):
    told = Told(tmp_path / "lines", monkeypatch)
    for iteration, seconds in enumerate((0.05, 0.05, 0.2, 0.3, 0.05)):
        told.iterate(iteration, seconds)
    assert told.sent == [LOOK, LOOK]
    assert told.left() == [0, 1, 2, 3, 4]


def test_nobody_who_looks_and_everything_is_sent(monkeypatch):
    told = Told(None, monkeypatch)
    told.iterate(0, 0.05)
    told.iterate(1, 0.05)
    assert [from_rank.validate_json(line).iteration for line in told.sent] == [0, 1]


def test_an_agent_that_does_not_look_for_long_is_sent_what_has_no_room(tmp_path, monkeypatch):
    told = Told(tmp_path / "lines", monkeypatch)
    for iteration in range(1000):
        told.iterate(iteration, 0.05)
    sent = [from_rank.validate_json(line).iteration for line in told.sent if line != LOOK]
    left = told.left()
    assert left + sent == list(range(1000))
    assert sent


DYING = """
import os, signal, socket, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_left_lines import ENV, HELLO, ProgressLines, replace
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[2])
link.sendall(HELLO)
progress = ProgressLines(replace(ENV, lines_file=Path(sys.argv[3])), link.sendall)
for iteration in range(50):
    progress.tell(iteration, loss=1.0, iteration_s=0.05, flops=1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
HELLO = from_rank.dump_json(RankHello(**WHO, pid=1)) + b"\n"


async def test_what_a_killed_rank_had_left_is_known_before_its_end_is_judged(tmp_path):
    (tmp_path / "beats").mkdir()
    table, heard = Ranks(), []
    rank = Rank(**WHO, gpu=0)
    table.add(rank)
    server = RankSocket(path=tmp_path / "s", ranks=table, tell=lambda _, message: heard.append(message))
    await server.start()
    path = lines_path(tmp_path, *rank.key)
    here = Path(__file__).parent
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, here, tmp_path / "s", path)
    assert await process.wait() == -signal.SIGKILL
    await rank.last_words()
    assert rank.silent.is_set()
    assert [it.iteration for it in heard if isinstance(it, Progress)] == list(range(50))
    table.forget(rank)
    assert not path.exists()
    await server.close()


async def test_what_is_sent_comes_after_what_was_left_before(tmp_path):
    (tmp_path / "beats").mkdir()
    table, heard = Ranks(), asyncio.Queue()
    rank = Rank(**WHO, gpu=0)
    table.add(rank)
    server = RankSocket(path=tmp_path / "s", ranks=table, tell=lambda _, message: heard.put_nowait(message))
    await server.start()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.fspath(tmp_path / "s"))
        link.sendall(HELLO)
        progress = ProgressLines(replace(ENV, lines_file=lines_path(tmp_path, *rank.key)), lambda _: None)
        for iteration in range(3):
            progress.tell(iteration, loss=1.0, iteration_s=0.05, flops=1.0)
        link.sendall(HELLO)
        async with asyncio.timeout(20):
            order = [await heard.get() for _ in range(4)]
    assert [getattr(it, "iteration", "hello") for it in order] == [0, 1, 2, "hello"]
    await server.close()
    table.forget(rank)
