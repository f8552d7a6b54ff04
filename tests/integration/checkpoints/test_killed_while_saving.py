"""A process that saves is killed at any instant: what it said it committed is found, and can be read to the last byte."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from select import select

import boto3
import pytest
from moto.server import ThreadedMotoServer
from saving_process import NUM_RANKS, content, save_for_ever

from unicron_lib.adapters.stores import create_store, open_store
from unicron_lib.checkpointing.repository import CheckpointRepository

PATIENCE_S = 60.0
PART = 8 << 20


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unicron_lib.checkpointing.repository", "unicron_lib.adapters.s3", "saving_process"])
    return context


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        yield "s3://bucket/prefix"
    server.stop()


def test_killed_a_dozen_times_in_a_directory(processes: ForkServerContext, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    create_store(url)
    assert kill_again_and_again(processes, url, kills=12, num_bytes=100_000, seed=1) > 0


def test_killed_a_few_times_with_s3(processes: ForkServerContext, s3: str) -> None:
    assert kill_again_and_again(processes, s3, kills=3, num_bytes=100_000, seed=2) > 0


@pytest.mark.storm
@pytest.mark.timeout(3000)
def test_killed_three_hundred_times(processes: ForkServerContext, tmp_path: Path, s3: str) -> None:
    url = (tmp_path / "store").as_uri()
    create_store(url)
    assert kill_again_and_again(processes, url, kills=240, num_bytes=2_000_000, seed=3) > 240
    assert kill_again_and_again(processes, f"{s3}/storm", kills=60, num_bytes=PART + 1000, seed=4) > 60


def kill_again_and_again(processes: ForkServerContext, url: str, *, kills: int, num_bytes: int, seed: int) -> int:
    """Kill a writer after the other; returns how many checkpoints they committed."""
    chance = random.Random(seed)
    repository = CheckpointRepository(open_store(url), "killed")
    committed, total = -1, 0
    for generation in range(1, kills + 1):
        said = live_and_die(processes, url, generation, num_bytes, chance)
        began = [number for word, number in said if word == "began"]
        assert all(number >= committed for number in began), f"generation {generation} resumed from {began}, not {committed}"
        saved = [number for word, number in said if word == "saved"]
        committed, total = max([committed, *began, *saved]), total + len(saved)
        newest, skipped = repository.newest_complete()
        assert not skipped, skipped[0]
        assert (newest.iteration if newest else -1) >= committed
        if newest:
            assert [bytes(shard) for shard in repository.load_shards(newest)] == [
                content(newest.iteration, newest.generation, rank, num_bytes) for rank in range(NUM_RANKS)
            ]
    assert_the_dead_leave_nothing(repository, url)
    return total


def assert_the_dead_leave_nothing(repository: CheckpointRepository, url: str) -> None:
    """The next writer's collector removes what was begun."""
    generation = 10_000
    repository.fence(generation)
    repository.collect(retain=2, generation=generation)
    assert open_store(url).unfinished("") == []


def live_and_die(
    processes: ForkServerContext, url: str, generation: int, num_bytes: int, chance: random.Random
) -> list[tuple[str, int]]:
    """What a writer said until it was killed, after one to six words and some more time."""
    reading, writing = os.pipe()
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = (_Sent(writing), variables, url, generation, num_bytes)
    process = processes.Process(target=_with_pipe, args=arguments, daemon=True)
    process.start()
    os.close(writing)
    num_words, text = chance.randrange(0, 6), b""
    while text.count(b"\n") < num_words:
        assert select([reading], [], [], PATIENCE_S)[0], f"the writer of generation {generation} says nothing"
        piece = os.read(reading, 4096)
        assert piece, f"the writer of generation {generation} ended by itself"
        text += piece
    process.join(chance.expovariate(1 / 0.02))  # not a wait for anything: any instant will do
    assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    while piece := os.read(reading, 4096):
        text += piece
    os.close(reading)
    return [(word, int(number)) for word, number in (line.split() for line in text.decode().splitlines())]


class _Sent:
    """A file descriptor on its way to another process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self):
        from multiprocessing.reduction import DupFd

        return _received, (DupFd(self.descriptor),)


def _received(sent) -> int:
    return sent.detach()


def _with_pipe(pipe: int, variables: dict[str, str], url: str, generation: int, num_bytes: int) -> None:
    os.environ.update(variables)  # the server that forks was started before they were set
    save_for_ever(url, generation, num_bytes, pipe)
