"""A script of its owner's as a job of a whole cluster: killed, moved, healed, finished."""

from pathlib import Path

import pytest
import yaml

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.errors import ControllerError

EXAMPLE = Path(__file__).parents[3] / "examples" / "ddp" / "ddp.yaml"


@pytest.fixture
def ddp_file(tmp_path: Path) -> Path:
    """The example, with a pace and a directory of the test's own."""
    described = yaml.safe_load(EXAMPLE.read_text())
    job = described["deployments"][0]["parameters"]["job"]
    arguments = ["--steps", "100", "--pace-s", "0.1", "--save-every", "5", "--checkpoint", str(tmp_path / "state" / "c.pt")]
    job |= {"command": ["python", "train.py", *arguments], "working_dir": str(EXAMPLE.parent), "min_gpus": 2, "max_gpus": 2}
    path = tmp_path / "ddp.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


def step_of(cluster) -> int:
    try:
        found = cluster.ask(lambda client: client.job_progress("ddp"))
    except ControllerError:
        return -1
    return found.iteration if found else -1


def test_a_script_is_restarted_from_its_own_checkpoint_and_finishes(cluster, ddp_file):
    cluster.until("two GPUs", lambda state: state.num_healthy_gpus >= 2)
    known = set(cluster.state.incidents)
    told = cluster.cli("submit", str(ddp_file)).stderr
    assert "twice the GPUs count as twice as fast" in told
    cluster.wait("steps beyond a checkpoint", lambda: step_of(cluster) >= 10)
    first = cluster.state.jobs["ddp"].generation
    cluster.cli("inject", "crash", "ddp/0")
    cluster.until("a new generation", lambda state: state.jobs["ddp"].generation > first)
    state = cluster.until("the end", lambda state: state.jobs["ddp"].status is not JobStatus.RUNNING)
    job = state.jobs["ddp"]
    assert job.status is JobStatus.FINISHED, job.reason
    assert job.reason == "its command has ended with exit code 0 on all ranks"
    assert ErrorKind.PROCESS_EXIT in {it.kind for it in cluster.new_failures(known) if "ddp" in it.jobs}
    logs = cluster.site.run_dir / "logs" / "ddp"
    assert "resumed from step" in (logs / f"g{first + 1}-r0.log").read_text()
    assert "ended after step 99" in (logs / f"g{job.generation}-r0.log").read_text()
    cluster.check_journal()
