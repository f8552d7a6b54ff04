import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_cluster import LocalCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """A controller and one agent, n0; nothing of it is left at the end."""
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start_controller()
        cluster.start_agent()
        await cluster.node()
        yield cluster
    finally:
        await cluster.close()
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or ())]
    assert not left
