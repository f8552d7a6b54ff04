"""A whole local cluster by `unicron up`, shared by the tests of this folder."""

import os
import subprocess

import pytest
from whole_cluster import UNICRON, Cluster, job_file

from unicron_lib.adapters.stores import open_store
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.journal import Journal
from unicron_lib.local.processes import MARK, marked
from unicron_lib.local.site import load_site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the same two jobs follow each other: others cancel them."""
    items.sort(key=lambda item: "pair" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    home = tmp_path_factory.mktemp("unicron-home")
    env = {**os.environ, "UNICRON_HOME": str(home)}
    env.pop(MARK, None)
    started = subprocess.run(
        [UNICRON, "up", "--nodes", "3", "--gpus-per-node", "2", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    site = load_site(home)
    made = Cluster(home=home, site=site, journal=Journal(open_store(site.store_url)))
    try:
        yield made
    finally:
        made.cli("down")
        assert marked(site.cluster_id) == []


@pytest.fixture
def pair(cluster, tmp_path):
    """Two running jobs, 4 and 2 GPUs, on a whole cluster."""
    cluster.bring_back()
    running = {name for name, job in cluster.state.jobs.items() if job.status is JobStatus.RUNNING}
    for name, weight in (("big", 4.0), ("small", 1.0)):
        if name not in running:
            table = {2: 5.0e8, 4: 9.0e8}
            keys = {"weight": weight, "throughput_flops": table, "max_gpus": 4, "transition_s": 1.0}
            cluster.cli("submit", str(job_file(tmp_path, name, **keys)))
    cluster.calm({"big": 4, "small": 2})
    cluster.trains_on()
    return cluster
