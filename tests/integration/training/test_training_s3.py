"""Ranks save to and restore from an S3 server, by the same code that runs in production."""

from collections.abc import Iterator

import boto3
import pytest
from elastic import first, held, job, reached
from moto.server import ThreadedMotoServer
from training_jobs import tiny

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankFinished
from unicron_lib.checkpointing.repository import CheckpointRepository


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield variables
    server.stop()


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


def test_an_abort_spares_what_is_on_its_way_to_s3(ranks, s3: dict[str, str]) -> None:
    """Every iteration is saved, so that there is always a save under way when the ranks are cut off from each other."""
    spec = job("spared", save_interval=1, pace_s=0.02, train_iters=1000)
    ranks.store_url, ranks.extra = "s3://bucket/prefix", s3
    ranks.launch(spec, 2)
    for generation in range(1, 5):
        reached(ranks, 4 * generation, generation=generation)
        held(ranks, "abort", generation=generation, of=(0, 1))
        ranks.launch(spec, 2, generation=generation + 1, kept={0: (generation, 0), 1: (generation, 1)})
        first(ranks, generation=generation + 1, world_size=2)
    manifest, skipped = CheckpointRepository(open_store("s3://bucket/prefix"), "spared").newest_complete()
    assert manifest is not None
    assert skipped == []
    problems = [line for line in ranks.logs().splitlines() if "is not saved" in line and "still in flight" not in line]
    assert [line for line in problems if "not all ranks wrote" not in line] == [], "a connection to the store was broken"
