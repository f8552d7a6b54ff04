"""Ranks save to and restore from an S3 server, by the same code that runs in production."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import boto3
import pytest
from elastic import job, reached
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from training_jobs import tiny
from werkzeug.serving import make_server

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankFinished, RankParked
from unicron_lib.checkpointing.manifest import parse_shard
from unicron_lib.checkpointing.repository import CheckpointRepository

DEADLINE_S = 60.0


class Gate:
    """An S3 server before which a save's shards may be kept waiting; `attempts` counts uploads by their paths.

    What is closed is closed for saves that begin afterwards: of one that has begun, a shard may be through already.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._changed = threading.Condition()
        self._is_open = True
        self._begun: set[str] = set()
        self.attempts: Counter[str] = Counter()
        self.waiting: list[str] = []

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and path.endswith(".safetensors"):
            self._pass(path)
        return self._app(environ, start_response)

    def _pass(self, path: str) -> None:
        save = path.rpartition("/")[0]
        with self._changed:
            self.attempts[path] += 1
            self.waiting.append(path)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or save in self._begun, DEADLINE_S)
            self._begun.add(save)
            self.waiting.remove(path)

    @contextmanager
    def closed(self, num_uploads: int) -> Iterator[list[str]]:
        """So many uploads, which this waits for, are under way in the block and end after it."""
        with self._changed:
            self._is_open = False
            assert self._changed.wait_for(lambda: len(set(self.waiting)) == num_uploads, DEADLINE_S), "no shards came"
        try:
            yield list(self.waiting)
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def s3(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    server = make_server("127.0.0.1", 0, gate, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield variables
    server.shutdown()
    thread.join()


def test_a_job_moves_from_two_ranks_to_three_by_way_of_s3(ranks, s3: dict[str, str]) -> None:
    spec = tiny(job="remote", pace_s=0.1, save_retain=1, loss_guard=False)
    ranks.store_url, ranks.extra = "s3://bucket/prefix", s3
    ranks.launch(spec, 2)
    ranks.agent.wait(Progress, generation=1, rank=0, when=lambda p: p.iteration == 4)
    ranks.agent.order(1, 0, "drain")
    _, drained = ranks.agent.wait(RankDrained, generation=1, rank=1)
    ranks.launch(spec, 3, generation=2, restore_from=drained.manifest)
    ranks.agent.wait(RankFinished, generation=2, rank=2)
    first = ranks.agent.all(Progress, generation=2, rank=0)[0]
    assert first.iteration == drained.iteration + 1
    store = open_store("s3://bucket/prefix")
    manifest, skipped = CheckpointRepository(store, "remote").newest_complete()
    assert (manifest.iteration, manifest.generation, len(manifest.shards), skipped) == (9, 2, 3, [])
    assert store.list("jobs/remote/manifests/") == [manifest.key]


def test_an_abort_spares_what_is_on_its_way_to_s3(ranks, s3: dict[str, str], gate: Gate) -> None:
    """Both ranks' shards are on their way when the ranks are cut off from each other, and arrive by their first attempt."""
    spec = job("spared", save_interval=1, pace_s=0.3, train_iters=1000)
    ranks.store_url, ranks.extra = "s3://bucket/prefix", s3
    ranks.launch(spec, 2)
    reached(ranks, 1)
    store = open_store("s3://bucket/prefix")
    with gate.closed(2) as paths:
        for rank in (0, 1):
            ranks.agent.order(1, rank, "abort")
        # one is enough: the other may hang in gloo, with its connections broken again and again
        until(lambda: any(ranks.agent.all(RankParked, generation=1, rank=rank) for rank in (0, 1)), "no rank has parked")
        assert sorted(gate.waiting) == sorted(paths), "they were under way all the time"
    for path in paths:
        sidecar = path.removeprefix("/bucket/prefix/").replace(".safetensors", ".json")
        until(lambda sidecar=sidecar: store.list(sidecar) == [sidecar], f"{sidecar} did not come")
        shard = parse_shard(store.get(sidecar))
        assert len(CheckpointRepository(store, "spared").load_shard(shard)) == shard.num_bytes
    assert [gate.attempts[path] for path in paths] == [1, 1], "a connection to the store was broken"


def until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, otherwise
        threading.Event().wait(0.02)
