"""States in memory: only whole slots are found, whatever a dead writer has left."""

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.checkpointing import slots
from unicron_lib.checkpointing.room import Promises, Room, room_of, shortage
from unicron_lib.checkpointing.slot_digest import BLOCK_BYTES, digest_of
from unicron_lib.checkpointing.slot_header import HEADER_BYTES, MAGIC, SlotHeader, decode, encode, header_json
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.errors import SlotError

SIZE = 3 * BLOCK_BYTES + 13


def header(iteration: int = 5, generation: int = 2, **keys) -> SlotHeader:
    it = {"job": "a", "consumed_samples": 8, "loss": 1.5, "num_bytes": 100, "digest": "d", **keys}
    return SlotHeader(iteration=iteration, generation=generation, **it)


def write(pair: SlotPair, iteration: int, generation: int = 1, *, num_bytes: int = 100) -> SlotHeader:
    claim = pair.claim(num_bytes)
    assert claim is not None
    claim.data[:] = bytes([iteration % 256]) * num_bytes
    told = header(iteration, generation, num_bytes=num_bytes, digest=digest_of(claim.data), part=pair.part)
    claim.commit(told)
    return told


def iterations(pair: SlotPair) -> list[int]:
    return [it.iteration for it in pair.found()]


@pytest.fixture
def pair(tmp_path: Path) -> SlotPair:
    return SlotPair(tmp_path / "house" / "a")


# --- headers


def test_a_header_is_read_as_it_was_written() -> None:
    assert decode(encode(header())) == header()
    assert len(encode(header())) == HEADER_BYTES


@settings(max_examples=200)
@given(at=st.integers(0, HEADER_BYTES), cut=st.sampled_from(["to nothing", "to the one before"]))
def test_a_page_that_was_being_written_is_no_header(at: int, cut: str) -> None:
    """Killed at any byte: what lies behind is zero, or of the header before."""
    page = encode(header())
    behind = bytes(HEADER_BYTES - at) if cut == "to nothing" else encode(header(7, 3, digest="e" * 60))[at:]
    found = decode(page[:at] + behind)
    assert found in {None, header(), header(7, 3, digest="e" * 60)}


@given(st.binary(max_size=200))
def test_any_bytes_are_no_header(noise: bytes) -> None:
    assert decode(noise) is None
    assert decode(MAGIC + noise) is None


@pytest.mark.parametrize(
    "wrong",
    [{"job": "../x"}, {"loss": float("nan")}, {"num_bytes": 0}, {"iteration": -1}, {"generation": 10**10}, {"part": "../x"}],
)
def test_impossible_headers_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"impossible|bounds"):
        replace(header(), **wrong)


# --- digests


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(at: int, bit: int) -> None:
    data = bytearray(SIZE)
    before = digest_of(memoryview(data))
    data[at] ^= 1 << bit
    assert digest_of(memoryview(data)) != before


def test_blocks_that_change_places_are_noticed() -> None:
    block = BLOCK_BYTES
    data = b"a" * block + b"b" * block
    assert digest_of(memoryview(data)) != digest_of(memoryview(data[block:] + data[:block]))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, BLOCK_BYTES])
def test_any_size_has_a_digest(size: int) -> None:
    assert len(digest_of(memoryview(bytes(size)))) == 64


# --- pairs


def test_the_older_slot_is_written_next(pair: SlotPair) -> None:
    assert iterations(pair) == []
    for iteration, there in ((1, [1]), (2, [2, 1]), (3, [3, 2]), (4, [4, 3])):
        write(pair, iteration)
        assert iterations(pair) == there


def test_a_newer_generation_is_further_whatever_its_iteration(pair: SlotPair) -> None:
    write(pair, 90, 1)
    write(pair, 91, 1)
    write(pair, 50, 2)
    assert iterations(pair) == [50, 91]
    write(pair, 51, 2)
    assert iterations(pair) == [51, 50]


def test_a_slot_under_way_is_none_and_the_other_one_is_whole(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    claim = pair.claim(100)
    assert claim is not None
    assert iterations(pair) == [2]
    claim.data[:50] = b"x" * 50
    assert iterations(pair) == [2]
    claim.release()  # what the kernel does for a killed writer
    assert iterations(pair) == [2]
    write(pair, 3)
    assert iterations(pair) == [3, 2]


def test_a_writer_that_is_killed_leaves_what_was_whole(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    child = os.fork()
    if child == 0:
        claim = SlotPair(pair.directory).claim(100)
        assert claim is not None
        claim.data[:50] = b"x" * 50
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert iterations(pair) == [2]
    assert pair.check((1, 2)).iteration == 2
    write(pair, 3)
    assert iterations(pair) == [3, 2]


def test_who_is_read_is_not_written(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    with pair.reading((1, 1)) as (told, data):
        write(pair, 3)
        assert (told.iteration, bytes(data)) == (1, b"\x01" * 100)
        assert iterations(pair) == [3, 1]
        with SlotPair(pair.directory).reading((1, 3)):
            assert pair.claim(100) is None
    write(pair, 4)
    assert iterations(pair) == [4, 3]


def test_what_a_reader_writes_is_his_alone(pair: SlotPair) -> None:
    write(pair, 1)
    with pair.reading((1, 1)) as (_, data):
        data[:] = bytes(100)
    assert pair.check((1, 1)).iteration == 1


def test_a_damaged_state_is_refused(pair: SlotPair) -> None:
    write(pair, 1)
    (path,) = pair.directory.iterdir()
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 7)
        file.write(b"\xff")
    with pytest.raises(SlotError, match="the slot of iteration 1 is damaged"):
        pair.check((1, 1))


def test_a_state_that_was_cut_off_is_refused(pair: SlotPair) -> None:
    write(pair, 1)
    (path,) = pair.directory.iterdir()
    os.truncate(path, HEADER_BYTES + 50)
    with pytest.raises(SlotError, match="another size"):
        pair.check((1, 1))


def test_a_slot_that_is_gone_is_none(pair: SlotPair) -> None:
    with pytest.raises(SlotError, match="no slot of iteration 1 of generation 1"), pair.reading((1, 1)):
        pass


def test_another_size_makes_new_slots(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    write(pair, 3, num_bytes=5000)
    assert pair.check((1, 3)).num_bytes == 5000
    assert pair.check((1, 2)).num_bytes == 100


def test_removed_slots_are_made_anew(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    assert pair.forget(2) == 2
    assert iterations(pair) == []
    write(pair, 3)
    assert iterations(pair) == [3]


def test_newer_generations_are_not_forgotten(pair: SlotPair) -> None:
    write(pair, 1, 1)
    write(pair, 2, 2)
    assert pair.forget(2) == 1
    assert iterations(pair) == [2]


def test_no_descriptor_is_left_open_by_who_comes_again(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for iteration in range(3, 20):
        write(pair, iteration, num_bytes=100 + iteration % 2)
        pair.check((1, iteration))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize("which", ["house", "house/a"])
def test_what_others_could_write_to_is_not_used(pair: SlotPair, tmp_path: Path, which: str) -> None:
    write(pair, 1)
    (tmp_path / which).chmod(0o777)
    with pytest.raises(SlotError, match="which others may write to"):
        pair.claim(100)
    with pytest.raises(SlotError, match="which others may write to"), pair.reading((1, 1)):
        pass


def test_locks_of_the_dead_are_lifted(pair: SlotPair) -> None:
    write(pair, 1)
    child = os.fork()
    if child == 0:
        fcntl.flock(os.open(pair.directory / "0.slot", os.O_RDWR), fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(child, 0)
    write(pair, 2)
    write(pair, 3)
    assert iterations(pair) == [3, 2]


# --- slots that are filled as files


def receive(pair: SlotPair, iteration: int, *, num_bytes: int = 100) -> None:
    data = bytes([iteration % 256]) * num_bytes
    with pair.receiving(num_bytes) as claim:
        os.pwrite(claim.descriptor, data, HEADER_BYTES)
        claim.commit(header(iteration, 1, num_bytes=num_bytes, digest=digest_of(memoryview(data)), part=pair.part))


def test_what_is_received_takes_the_place_of_the_older_one(pair: SlotPair) -> None:
    for iteration, there in ((1, [1]), (2, [2, 1]), (3, [3, 2]), (4, [4, 3])):
        receive(pair, iteration)
        assert iterations(pair) == there
        assert pair.check((1, iteration)).iteration == iteration


@pytest.mark.parametrize("before", [1, 100, 100_000])
def test_what_is_received_has_its_own_size(pair: SlotPair, before: int) -> None:
    write(pair, 1, num_bytes=before)
    write(pair, 2, num_bytes=before)
    receive(pair, 3, num_bytes=5000)
    assert pair.check((1, 3)).num_bytes == 5000
    assert pair.check((1, 2)).num_bytes == before


def test_what_is_not_committed_does_not_count_and_keeps_no_memory(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    with suppress(ConnectionError), pair.receiving(100) as claim:
        os.pwrite(claim.descriptor, b"x" * 50, HEADER_BYTES)
        assert iterations(pair) == [2]
        raise ConnectionError
    assert iterations(pair) == [2]
    assert not (pair.directory / "0.slot").exists()
    receive(pair, 3)
    assert iterations(pair) == [3, 2]


def test_a_receiver_that_is_killed_before_it_commits_leaves_no_header(pair: SlotPair) -> None:
    write(pair, 1)
    write(pair, 2)
    child = os.fork()
    if child == 0:
        with SlotPair(pair.directory).receiving(100) as claim:
            os.pwrite(claim.descriptor, b"x" * 100, HEADER_BYTES)
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert decode((pair.directory / "0.slot").read_bytes()[:HEADER_BYTES]) is None
    assert iterations(pair) == [2]
    receive(pair, 3)
    assert iterations(pair) == [3, 2]


def test_who_is_read_is_not_received_into(pair: SlotPair) -> None:
    write(pair, 1)
    with pair.reading((1, 1)), pair.receiving(100) as claim:
        with pytest.raises(SlotError, match="both slots of a are in use"), SlotPair(pair.directory).receiving(100):
            pass
        claim.commit(header(2, 1))
    assert iterations(pair) == [2, 1]


def test_a_rank_that_has_a_slot_mapped_does_not_write_into_what_others_have_cut(pair: SlotPair) -> None:
    """Memory that is not there any more would kill it."""
    size = 3 * mmap.PAGESIZE
    write(pair, 1, num_bytes=size)
    write(pair, 2, num_bytes=size)
    with suppress(ConnectionError), SlotPair(pair.directory).receiving(size):
        raise ConnectionError
    write(pair, 3, num_bytes=size)
    assert pair.check((1, 3)).num_bytes == size


def test_what_a_rank_has_mapped_is_never_cut(pair: SlotPair) -> None:
    """Also between its look at the file and its first write: before, a receiver that broke off then had it killed."""
    size = 3 * mmap.PAGESIZE
    write(pair, 1, num_bytes=size)
    write(pair, 2, num_bytes=size)
    mapped = pair._mapped["0.slot"]
    with suppress(ConnectionError), SlotPair(pair.directory).receiving(size):
        raise ConnectionError
    mapped.view[:] = bytes(len(mapped.view))
    assert not mapped.is_at(pair.directory / "0.slot")


def test_who_waited_for_a_slot_that_was_removed_meanwhile_takes_the_new_one(pair: SlotPair, monkeypatch) -> None:
    write(pair, 1)
    path, lock = pair.directory / "0.slot", slots._lock

    def removed_first(descriptor: int, kind: int) -> bool:
        monkeypatch.setattr(slots, "_lock", lock)
        path.unlink()
        return lock(descriptor, kind)

    write(pair, 2)
    monkeypatch.setattr(slots, "_lock", removed_first)
    other = SlotPair(pair.directory)
    write(other, 3)
    assert other._mapped["0.slot"].is_at(path)
    assert iterations(pair) == [3, 2]


def test_memory_that_was_promised_is_promised_to_nobody_else(pair: SlotPair, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 * mmap.PAGESIZE
    monkeypatch.setattr(slots, "PROMISES", Promises())
    monkeypatch.setattr(slots, "room_of", lambda _: room(left=100 * mmap.PAGESIZE))
    with SlotPair(pair.directory, "tp0of2-pp0of1").receiving(size) as first:
        with pytest.raises(SlotError, match="no state is kept in memory: "), pair.receiving(size):
            pytest.fail("both together are too much")
        os.posix_fallocate(first.descriptor, 0, size)  # it has taken what it was promised: the rest is told by the room itself
        with pair.receiving(size):
            pass
    with pair.receiving(size):
        pass


def test_memory_that_ends_while_a_state_comes_is_told(pair: SlotPair) -> None:
    with pytest.raises(SlotError, match=r"no state can be kept in .*: No space left on device"), pair.receiving(100):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert iterations(pair) == []


def test_nothing_is_received_without_memory(pair: SlotPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "room_of", lambda _: room(left=10))
    with pytest.raises(SlotError, match="no state is kept in memory: "), pair.receiving(mmap.PAGESIZE):
        pytest.fail("there is no room")


# --- memory


def room(**keys) -> Room:
    return Room(**{"total": 1000 << 20, "available": 900 << 20, "left": 900 << 20, "held": 0, **keys})


def test_what_fits_is_taken() -> None:
    assert shortage(400 << 20, room()) == ""


@pytest.mark.parametrize("short", [{"left": 64 << 20}, {"available": 150 << 20}, {"held": 480 << 20}])
def test_memory_that_others_need_is_not_taken(short) -> None:
    told = shortage(100 << 20, room(**short))
    assert told.startswith("105 MB are wanted and ")
    assert "memory_interval: 0" in told


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n",
        "proc/self/cgroup": "0::/pod/it\n",
        "sys/fs/cgroup/pod/it/memory.max": "max\n",
        "sys/fs/cgroup/pod/it/memory.current": "200000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    house = tmp_path / "house" / "a"
    house.mkdir(parents=True)
    (house / "0.slot").write_bytes(bytes(8192))
    found = room_of(house, tmp_path)
    assert (found.total, found.available, found.held) == (1 << 20, 1 << 19, 8192)
    (tmp_path / "sys/fs/cgroup/pod/it/memory.max").write_text("300000\n")
    found = room_of(house, tmp_path)
    assert (found.total, found.available) == (300_000, 100_000)


def test_no_slot_is_made_without_memory(pair: SlotPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "room_of", lambda _: room(left=10))
    with pytest.raises(SlotError, match="no state is kept in memory: "):
        pair.claim(mmap.PAGESIZE)
    assert list(pair.directory.iterdir()) == []


# --- parts

LEFT, RIGHT = "tp0of2-pp0of1", "tp1of2-pp0of1"


def test_each_part_has_slots_of_its_own(tmp_path: Path) -> None:
    left, right, whole = (SlotPair(tmp_path / "house" / "a", part) for part in (LEFT, RIGHT, ""))
    for iteration in (1, 2, 3):
        write(left, iteration)
    write(right, 3)
    assert (iterations(left), iterations(right), iterations(whole)) == ([3, 2], [3], [])
    assert slots.parts_in(left.directory) == [LEFT, RIGHT]
    write(whole, 4)
    assert slots.parts_in(left.directory) == ["", LEFT, RIGHT]


def test_a_slot_of_another_part_is_not_read(tmp_path: Path) -> None:
    left, right = (SlotPair(tmp_path / "house" / "a", part) for part in (LEFT, RIGHT))
    write(left, 1)
    (left.directory / f"{LEFT}.0.slot").rename(left.directory / f"{RIGHT}.0.slot")
    with pytest.raises(SlotError, match="there is no slot of iteration 1"):
        right.check((1, 1))


def test_a_header_of_an_earlier_version_is_one_of_a_whole_state() -> None:
    told = header_json.dump_json(header()).replace(b',"part":""', b"")
    assert header_json.validate_json(told) == header()
