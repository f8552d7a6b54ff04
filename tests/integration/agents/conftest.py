import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from local_cluster import LocalCluster, running


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
