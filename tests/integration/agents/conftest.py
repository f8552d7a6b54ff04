import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from local_cluster import LocalCluster


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[LocalCluster]:
    """A controller and one agent, n0; nothing of it is left at the end."""
    cluster = LocalCluster(directory)
    try:
        await cluster.start_controller()
        cluster.start_agent()
        await cluster.node()
        yield cluster
    finally:
        await cluster.close()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or ())]
    assert not left


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """A cluster of the test's own, to be broken."""
    async with running(tmp_path) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all tests of a module."""
    async with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
