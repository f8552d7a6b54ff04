"""States from node to node: signed, compared, and refused where they do not belong."""

import errno
import fcntl
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from unicron_lib.agent import copying, slot_house, slot_places, slot_wire
from unicron_lib.agent.copying import Copying, Following
from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memory import NodeMemory
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.agent.slot_wire import Answer, Channel, Get, SlotServer, fetch, offer
from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.checkpointing.slot_header import HEADER_BYTES, SlotHeader
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.errors import SlotError

TOKEN = "secret"
NUM_BYTES = 9 << 20


def write(pair: SlotPair, iteration: int, generation: int = 1, *, num_bytes: int = NUM_BYTES) -> SlotHeader:
    claim = pair.claim(num_bytes)
    claim.data[:] = secrets.token_bytes(num_bytes)
    header = SlotHeader(
        job="a",
        generation=generation,
        iteration=iteration,
        consumed_samples=8,
        loss=1.5,
        num_bytes=num_bytes,
        digest=digest_of(claim.data),
        part=pair.part,
    )
    claim.commit(header)
    return header


@pytest.fixture
def here(tmp_path: Path) -> SlotPair:
    return SlotHouse(tmp_path / "here").pair("a")


@pytest.fixture
def house(tmp_path: Path) -> SlotHouse:
    return SlotHouse(tmp_path / "there")


@pytest.fixture
def refusals() -> dict[int, str]:
    """Why states of a generation are not taken."""
    return {}


@pytest.fixture
def peer(house: SlotHouse, refusals: dict[int, str]) -> Iterator[str]:
    server = SlotServer(house=house, token=TOKEN, refusal=lambda header: refusals.get(header.generation, ""))
    server.start("127.0.0.1")
    yield f"127.0.0.1:{server.port}"
    server.close()


def get(iteration: int) -> Get:
    return Get(job="a", generation=1, iteration=iteration)


def test_a_state_is_given_and_fetched_again(here: SlotPair, house: SlotHouse, peer: str, tmp_path: Path) -> None:
    header = write(here, 7)
    assert offer(peer, TOKEN, here, header)
    assert house.pair("a").check((1, 7)) == header
    elsewhere = SlotHouse(tmp_path / "elsewhere").pair("a")
    assert fetch(peer, TOKEN, elsewhere, get(7)) == header
    assert elsewhere.check((1, 7)) == header


def test_what_is_there_travels_once(here: SlotPair, peer: str) -> None:
    header = write(here, 7)
    assert offer(peer, TOKEN, here, header)
    assert not offer(peer, TOKEN, here, header)


def test_however_many_states_have_come_nothing_of_them_stays_open(here: SlotPair, house: SlotHouse, peer: str) -> None:
    def num_open() -> int:
        for thread in threading.enumerate():
            if thread.name == "slot":  # the server closes its end when it has heard the last word
                thread.join(10.0)
        return len(list(Path("/proc/self/fd").iterdir()))

    for iteration in (1, 2):
        offer(peer, TOKEN, here, write(here, iteration))
    before = num_open()
    for iteration in range(3, 13):
        offer(peer, TOKEN, here, write(here, iteration))
        fetch(peer, TOKEN, house.pair("b"), Get(job="a", generation=1, iteration=iteration))
    assert num_open() == before


def test_an_older_state_is_refused(here: SlotPair, house: SlotHouse, peer: str) -> None:
    write(house.pair("a"), 5, 2)
    with pytest.raises(SlotError, match="iteration 5 of generation 2 is there already"):
        offer(peer, TOKEN, here, write(here, 200, 1))


def test_a_replaced_generation_is_refused(here: SlotPair, house: SlotHouse, peer: str, refusals: dict[int, str]) -> None:
    refusals[1] = "generation 1 has been replaced"
    with pytest.raises(SlotError, match="generation 1 has been replaced"):
        offer(peer, TOKEN, here, write(here, 7))
    assert house.pair("a").found() == []


def test_who_has_another_token_gets_and_gives_nothing(here: SlotPair, house: SlotHouse, peer: str) -> None:
    header = write(here, 7)
    with pytest.raises((SlotError, OSError)):
        offer(peer, "another", here, header)
    assert house.pair("a").found() == []
    write(house.pair("a"), 9)
    with pytest.raises((SlotError, OSError)):
        fetch(peer, "another", here, get(9))


def test_what_is_not_there_is_told(here: SlotPair, peer: str) -> None:
    with pytest.raises(SlotError, match="there is no slot of iteration 3 of generation 1"):
        fetch(peer, TOKEN, here, get(3))


def test_a_damaged_state_is_not_taken(here: SlotPair, house: SlotHouse, peer: str) -> None:
    header = write(here, 7)
    with (here.directory / "0.slot").open("r+b") as file:
        file.seek(HEADER_BYTES + 5_000_000)
        file.write(b"\0\0\0\0\0\0\0\0")
    with pytest.raises(SlotError, match="the copy is damaged"):
        offer(peer, TOKEN, here, header)
    assert house.pair("a").found() == []


def test_a_damaged_state_is_not_fetched(here: SlotPair, house: SlotHouse, peer: str) -> None:
    write(house.pair("a"), 7)
    with (house.directory / "a" / "0.slot").open("r+b") as file:
        file.seek(HEADER_BYTES + NUM_BYTES - 9)
        file.write(b"\0\0\0\0\0\0\0\0")
    with pytest.raises(SlotError, match="the copy is damaged"):
        fetch(peer, TOKEN, here, get(7))
    assert here.found() == []


def test_a_slot_stays_locked_until_who_gets_it_has_all_of_it(house: SlotHouse, peer: str) -> None:
    """What has not arrived yet is sent out of the slot's own pages."""
    write(house.pair("a"), 7)
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        channel = Channel(connection, TOKEN, is_server=False)
        channel.say(slot_wire._request.dump_json(get(7)))
        header = slot_wire._heard(channel).header
        with (house.directory / "got").open("w+b", buffering=0) as file:
            assert channel.receive_state(file.fileno(), NUM_BYTES) == header.digest
        assert is_locked(house)
        channel.say(slot_wire._answer.dump_json(Answer()))
        assert connection.recv(1) == b""
    assert not is_locked(house)


def test_who_hangs_up_instead_of_a_last_word_leaves_no_lock(house: SlotHouse, peer: str, caplog) -> None:
    """As agents of earlier versions do."""
    caplog.set_level("INFO")
    write(house.pair("a"), 7)
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        channel = Channel(connection, TOKEN, is_server=False)
        channel.say(slot_wire._request.dump_json(get(7)))
        slot_wire._heard(channel)
        with (house.directory / "got").open("w+b", buffering=0) as file:
            channel.receive_state(file.fileno(), NUM_BYTES)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    assert not is_locked(house)
    assert {record.levelname for record in caplog.records} <= {"INFO"}
    assert fetch(peer, TOKEN, house.pair("b"), get(7)).iteration == 7


def is_locked(house: SlotHouse) -> bool:
    with (house.directory / "a" / "0.slot").open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_node_whose_memory_ends_says_so_and_leaves_nothing(here: SlotPair, house: SlotHouse, peer: str, monkeypatch) -> None:
    write(house.pair("a"), 7)
    splice = os.splice

    def full(source: int, target: int, count: int, **places) -> int:
        if "offset_dst" in places:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return splice(source, target, count, **places)

    monkeypatch.setattr(os, "splice", full)
    with pytest.raises(SlotError, match=r"no state can be kept in .*: No space left on device"):
        fetch(peer, TOKEN, here, get(7))
    assert here.found() == []
    assert sum(path.stat().st_size for path in here.directory.iterdir()) == 0
    monkeypatch.undo()
    assert fetch(peer, TOKEN, here, get(7)).iteration == 7


def test_a_copy_that_is_not_there_by_its_deadline_is_given_up(here: SlotPair, house: SlotHouse, peer: str, monkeypatch) -> None:
    write(house.pair("a"), 7)
    monkeypatch.setattr(slot_wire, "deadline_s", lambda _: 0.0)
    with pytest.raises(SlotError, match="the copy was not there by its deadline"):
        fetch(peer, TOKEN, here, get(7))
    assert here.found() == []


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0" * 4096])
def test_strangers_do_no_harm(noise: bytes, here: SlotPair, peer: str) -> None:
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
    assert offer(peer, TOKEN, here, write(here, 7))


def test_a_giver_that_breaks_off_leaves_the_last_copy(here: SlotPair, house: SlotHouse, peer: str) -> None:
    assert offer(peer, TOKEN, here, write(here, 7))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=pass_on, args=(listener, peer, 3 << 20), daemon=True).start()
    with pytest.raises((SlotError, OSError)):
        offer(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, here, write(here, 8))
    assert [header.iteration for header in house.compared("a")[0]] == [7]
    listener.close()


def pass_on(listener: socket.socket, peer: str, limit: int) -> None:
    """A network that breaks after so many bytes."""
    host, _, port = peer.rpartition(":")
    near, _ = listener.accept()
    with near, socket.create_connection((host, int(port))) as far:
        threading.Thread(target=pour, args=(far, near), daemon=True).start()
        while limit > 0 and (piece := receive(near)):
            far.sendall(piece)
            limit -= len(piece)
        far.shutdown(socket.SHUT_RDWR)  # to close it alone would tell nobody while the other thread reads there


def pour(far: socket.socket, near: socket.socket) -> None:
    with suppress(OSError):
        while piece := receive(far):
            near.sendall(piece)


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


# --- when


def test_a_transfer_is_followed_by_a_pause_and_only_news_travel() -> None:
    it = Following(peers=["p", "q"])
    assert it.is_due((1, 5), 100.0)
    it.was_taken((1, 5), 100.0, 101.0)
    assert not it.is_due((1, 6), 110.0)
    assert it.is_due((1, 6), 101.0 + 1.0 / copying.DUTY)
    assert not it.is_due((1, 5), 200.0)
    assert it.is_due((1, 5), 101.0 + copying.REMIND_S)


def test_the_pause_ends_before_the_copy_is_taken_for_idle() -> None:
    it = Following(peers=["p"])
    it.was_taken((1, 5), 0.0, 1000.0)
    assert it.is_due((1, 6), 1000.0 + slot_house.IDLE_S / 2)


def test_who_does_not_answer_is_asked_after_the_others() -> None:
    it = Following(peers=["p", "q"])
    it.was_taken((1, 5), 100.0, 100.1)
    it.was_not_taken(200.0)
    assert it.peers == ["q", "p"]
    assert not it.is_due((1, 5), 201.0)
    assert it.is_due((1, 5), 200.0 + copying.RETRY_S)


async def test_the_newest_state_goes_to_the_first_peer_that_lives(
    here: SlotPair, house: SlotHouse, peer: str, monkeypatch
) -> None:
    monkeypatch.setattr(copying, "RETRY_S", 0.0)
    job = Copying(SlotHouse(here.directory.parent), TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    job.follow("a", (nobody, peer))
    await job.look()
    write(here, 6)
    write(here, 7)
    await job.look()
    assert house.pair("a").found() == []
    await job.look()
    assert [header.iteration for header in house.pair("a").found()] == [7]
    job.keep_only(())
    write(here, 8)
    await job.look()
    assert [header.iteration for header in house.pair("a").found()] == [7]
    job.close()


# --- parts

LEFT, RIGHT = "tp0of2-pp0of1", "tp1of2-pp0of1"


def test_a_part_is_given_and_fetched_as_such(here: SlotPair, house: SlotHouse, peer: str, tmp_path: Path) -> None:
    left = SlotPair(here.directory, LEFT)
    header = write(left, 7, num_bytes=1000)
    assert offer(peer, TOKEN, left, header)
    assert house.pair("a", LEFT).check((1, 7)) == header
    elsewhere = SlotHouse(tmp_path / "elsewhere").pair("a", LEFT)
    wanted = Get(job="a", generation=1, iteration=7, part=LEFT)
    assert fetch(peer, TOKEN, elsewhere, wanted) == header
    with pytest.raises(SlotError, match="there is no slot of iteration 7"):
        fetch(peer, TOKEN, SlotPair(here.directory, RIGHT), Get(job="a", generation=1, iteration=7, part=RIGHT))


async def test_parts_travel_each_and_the_next_are_wanted_after_a_pause(house: SlotHouse, peer: str, tmp_path: Path) -> None:
    home = SlotHouse(tmp_path / "here")
    job, sent = Copying(home, TOKEN), [home.travelling("a", part) for part in (LEFT, RIGHT)]
    job.follow("a", (peer,), (LEFT, RIGHT))
    write(home.pair("a", LEFT), 9, num_bytes=1000)
    for slot in sent:
        write(slot, 7, num_bytes=1000)
    await job.look()
    assert [header.iteration for part in (LEFT, RIGHT) for header in house.pair("a", part).found()] == [7, 7]
    for following in job._jobs.values():
        following.free_at = float("inf")
    await job.look()
    assert [slot.has_travelled for slot in sent] == [False, False]
    for following in job._jobs.values():
        following.free_at = 0.0
    await job.look()
    assert [slot.has_travelled for slot in sent] == [True, True]
    job.close()


def test_parts_share_the_time_in_which_states_travel() -> None:
    it = Following(peers=["p"], parts=2)
    it.was_taken((1, 5), 100.0, 101.0)
    assert it.free_at == pytest.approx(100.0 + 2.0 / copying.DUTY)


def test_what_was_put_aside_is_given_while_the_next_one_is_written(house: SlotHouse, peer: str, tmp_path: Path) -> None:
    slot, elsewhere = house.travelling("a", LEFT), SlotHouse(tmp_path / "elsewhere").pair("a", LEFT)
    for iteration in (7, 8):
        write(slot, iteration, num_bytes=1000)
        slot.mark_travelled((1, iteration))
        slot.put_aside()
    assert slot.claim(1000) is not None
    assert fetch(peer, TOKEN, elsewhere, Get(job="a", generation=1, iteration=8, part=LEFT)).iteration == 8
    with pytest.raises(SlotError, match="there is no slot of iteration 7"):
        fetch(peer, TOKEN, elsewhere, Get(job="a", generation=1, iteration=7, part=LEFT))


def test_what_has_not_travelled_does_not_take_the_place_of_what_has(house: SlotHouse) -> None:
    slot = house.travelling("a", LEFT)
    write(slot, 7, num_bytes=1000)
    slot.mark_travelled((1, 6))
    assert not slot.has_travelled
    slot.mark_travelled((1, 7))
    slot.put_aside()
    for iteration in (8, 9):
        write(slot, iteration, generation=2, num_bytes=1000)
        slot.put_aside()
    assert [header.place for header in house.compared("a")[0]] == [(2, 9), (1, 7)]


# --- the house


def test_of_parts_both_slots_are_told(house: SlotHouse) -> None:
    for iteration in (1, 2):
        write(house.pair("a", LEFT), iteration, num_bytes=1000)
    write(house.travelling("a", LEFT), 1, num_bytes=1000)
    whole, reasons = house.compared("a")
    assert [(header.part, header.iteration) for header in whole] == [(LEFT, 2), (LEFT, 1)]
    assert reasons == []
    assert house.forget("a", 5) == 3
    assert not (house.directory / "a").exists()


@pytest.mark.parametrize("travel", [False, True])
def test_parts_of_another_layout_go_when_those_of_this_one_are_as_safe(house: SlotHouse, *, travel: bool) -> None:
    old = house.pair("a", "tp0of1-pp1of2")
    write(old, 7, num_bytes=1000)
    forget = partial(house.forget_other_layouts, "a", (LEFT, RIGHT), generation=2, travel=travel)
    for part in (LEFT, RIGHT):
        for iteration in (8, 9):
            assert forget() == 0
            write(house.pair("a", part), iteration, generation=2, num_bytes=1000)
        if travel:
            assert forget() == 0
            write(house.travelling("a", part), 8, generation=2, num_bytes=1000)
            house.travelling("a", part).mark_travelled((2, 8))
            house.travelling("a", part).put_aside()
    assert forget() == 1
    assert old.found() == []
    assert forget() == 0


async def test_a_job_that_has_changed_its_layout_leaves_nothing_of_the_last_one(tmp_path: Path, monkeypatch) -> None:
    for module in (slot_house, slot_places):
        monkeypatch.setattr(module, "SHARED", tmp_path)
    ranks = Ranks()
    facts = NodeFacts(node="n", address="127.0.0.1", num_gpus=1, run_dir=tmp_path / "run")
    memory = NodeMemory(facts=facts, token=TOKEN, ranks=ranks, fence=Fence())
    house = SlotHouse(slot_places.slot_directory(facts.run_dir, facts.node))
    for job in ("a", "b"):
        write(house.pair(job), 7, num_bytes=1000)
        ranks.add(Rank(job=job, generation=2, rank=0, gpu=0))
    memory.follow("a", (), (LEFT,), generation=2)
    for iteration in (8, 9):
        write(house.pair("a", LEFT), iteration, generation=2, num_bytes=1000)
    await memory._sweep()
    assert (house.pair("a").found(), len(house.pair("a", LEFT).found()), len(house.pair("b").found())) == ([], 2, 1)
    memory.close()


def test_damaged_slots_are_told_and_left_out(house: SlotHouse) -> None:
    write(house.pair("a"), 1)
    write(house.pair("a"), 2)
    with (house.directory / "a" / "1.slot").open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\0\0\0\0\0\0\0\0")
    whole, reasons = house.compared("a")
    assert [header.iteration for header in whole] == [1]
    assert reasons == ["the slot of iteration 2 is damaged: its header tells of another digest"]


def test_the_furthest_slot_is_enough(house: SlotHouse) -> None:
    write(house.pair("a"), 1)
    write(house.pair("a"), 2)
    assert [header.iteration for header in house.compared("a")[0]] == [2]


def test_forgotten_jobs_leave_no_directory(house: SlotHouse) -> None:
    write(house.pair("a"), 1)
    assert house.forget("a", 5) == 1
    assert not (house.directory / "a").exists()
    assert house.forget("a", 5) == 0
    assert house.compared("a") == ([], [])


def test_idle_slots_are_swept_and_busy_ones_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(slot_house, "SHARED", tmp_path)
    monkeypatch.setattr(slot_house, "IDLE_S", -1.0)
    gone, mine = (SlotHouse(tmp_path / f"{slot_house.PREFIX}{slot_house.os.geteuid()}-{name}") for name in ("gone", "mine"))
    for place in (gone, mine):
        write(place.pair("a"), 1)
    mine.sweep(())
    assert list(tmp_path.iterdir()) == [mine.directory]
    assert list(mine.directory.iterdir()) == []
    write(mine.pair("a"), 1)
    monkeypatch.setattr(slot_house, "IDLE_S", 3600.0)
    mine.sweep({"a", "b"})
    assert [header.iteration for header in mine.pair("a").found()] == [1]
    mine.wipe()
    assert list(tmp_path.iterdir()) == []
