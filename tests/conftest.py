"""Helpers of the tests are importable from every test folder; what shares a cluster or a server shares a process."""

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "unit"))

settings.register_profile("gate", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("gate")
"""`make test` draws the same examples each time: it is green or red for what was changed. `make storm` draws new ones."""

TOGETHER = (
    "tests/integration/cluster",
    "tests/integration/agents",
    "tests/integration/training",
    "tests/flows/with_prefect",
)
"""Folders of which one process runs all tests, longest first: they share what is slow to start, or mind each other's load."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n`, one process runs all tests of a file, or of a folder of TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.partition("::")[0])
            return str(path.parent if str(path.parent) in TOGETHER else path)

    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, begin with what takes longest; without, end with the cluster, whose jobs train on until all tests are done."""
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)
    else:
        items.sort(key=lambda item: _rank(item) == 0)


def _rank(item: pytest.Item) -> int:
    folder = item.nodeid.partition("::")[0].rpartition("/")[0]
    return TOGETHER.index(folder) if folder in TOGETHER else len(TOGETHER)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Many ranks in one process: torch computes with one thread, and is a group of one that megatron may ask."""
    import torch
    import torch.distributed as dist

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)
