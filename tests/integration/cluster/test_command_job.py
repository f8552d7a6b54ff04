"""A script of its owner's as a job of a whole cluster: killed, moved, healed, finished."""

from pathlib import Path

import pytest
import yaml

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobState, JobStatus
from unicron_lib.domain.plans import StepKind
from unicron_lib.errors import ControllerError

EXAMPLE = Path(__file__).parents[3] / "examples" / "ddp" / "ddp.yaml"


def ddp_file(folder: Path, name: str, **keys: object) -> Path:
    """The example, with a name, a pace and a directory of the test's own."""
    described = yaml.safe_load(EXAMPLE.read_text())
    described["deployments"][0]["name"] = name
    job = described["deployments"][0]["parameters"]["job"]
    arguments = ["--steps", "100", "--pace-s", "0.1", "--save-every", "5", "--checkpoint", str(folder / "state" / "c.pt")]
    job |= {"job": name, "command": ["python", "train.py", *arguments], "working_dir": str(EXAMPLE.parent)}
    job |= {"min_gpus": 2, "max_gpus": 2, **keys}
    path = folder / "ddp.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


def step_of(cluster, job: str) -> int:
    try:
        found = cluster.ask(lambda client: client.job_progress(job))
    except ControllerError:
        return -1
    return found.iteration if found else -1


def pids_of(cluster, job: str) -> dict[int, int]:
    nodes = cluster.ask(lambda client: client.nodes())
    return {rank.rank: rank.pid for node in nodes for rank in node.ranks if rank.job == job}


def submitted(cluster, job: str, file: Path) -> int:
    """The generation of the script's job, which has saved."""
    cluster.until("two GPUs", lambda state: state.num_healthy_gpus >= 2)
    told = cluster.cli("submit", str(file)).stderr
    assert "twice the GPUs count as twice as fast" in told
    cluster.wait("steps beyond a checkpoint", lambda: step_of(cluster, job) >= 10)
    return cluster.state.jobs[job].generation


def finished(cluster, name: str) -> JobState:
    state = cluster.until("the end", lambda state: state.jobs[name].status is not JobStatus.RUNNING)
    job = state.jobs[name]
    assert job.status is JobStatus.FINISHED, job.reason
    return job


@pytest.mark.storm
def test_a_script_is_restarted_from_its_own_checkpoint_and_finishes(cluster, tmp_path):
    known = set(cluster.state.incidents)
    first = submitted(cluster, "ddp", ddp_file(tmp_path, "ddp", parks=False))
    cluster.cli("inject", "crash", "ddp/0")
    cluster.until("a new generation", lambda state: state.jobs["ddp"].generation > first)
    job = finished(cluster, "ddp")
    assert job.reason == "its command has ended with exit code 0 on all ranks"
    assert ErrorKind.PROCESS_EXIT in {it.kind for it in cluster.new_failures(known) if "ddp" in it.jobs}
    logs = cluster.site.run_dir / "logs" / "ddp"
    assert "resumed from step" in (logs / f"g{first + 1}-r0.log").read_text()
    assert "ended after step 99" in (logs / f"g{job.generation}-r0.log").read_text()
    cluster.check_journal()


def test_a_script_that_parks_goes_on_in_the_same_process_after_the_last_step_that_it_made(cluster, tmp_path):
    first = submitted(cluster, "parks", ddp_file(tmp_path, "parks"))
    before = pids_of(cluster, "parks")
    cluster.cli("inject", "crash", "parks/0")
    cluster.until("a new generation", lambda state: state.jobs["parks"].generation > first)
    cluster.wait("a new rank 0", lambda: pids_of(cluster, "parks").get(0, before[0]) != before[0])
    after = pids_of(cluster, "parks")
    job = finished(cluster, "parks")
    assert after[1] == before[1]
    assert after[0] != before[0]
    healed = next(it for it in cluster.state.plans.values() if _begins(it.plan, first + 1))
    results = {step.kind: healed.results[step.id] for step in healed.plan.steps}
    held = results[StepKind.DRAIN]["iteration"]
    assert results[StepKind.LAUNCH]["from"] == "memory of 1 rank"
    assert results[StepKind.RESUME]["went_on_after"] == held
    logs = cluster.site.run_dir / "logs" / "parks"
    assert f"took the state after step {held} from rank 1" in (logs / f"g{first + 1}-r0.log").read_text()
    assert "resumed from" not in (logs / f"g{job.generation}-r1.log").read_text()
    cluster.check_journal()


@pytest.mark.storm
def test_a_script_that_parks_outlives_the_loss_of_a_node(cluster, tmp_path):
    known = set(cluster.state.incidents)
    first = submitted(cluster, "loses", ddp_file(tmp_path, "loses", max_gpus=4))
    assignment = cluster.state.jobs["loses"].assignment
    assert (assignment.num_gpus, len(assignment.nodes)) == (4, 2)
    before, node = pids_of(cluster, "loses"), assignment.nodes[-1]
    cluster.cli("inject", "node-loss", node)
    cluster.until("a new generation", lambda state: state.jobs["loses"].generation > first)
    cluster.wait("ranks elsewhere", lambda: len(set(pids_of(cluster, "loses").values()) - set(before.values())) == 2)
    assert len(set(pids_of(cluster, "loses").values()) & set(before.values())) == 2
    finished(cluster, "loses")
    assert ErrorKind.NODE_LOST in {it.kind for it in cluster.new_failures(known) if "loses" in it.jobs}
    healed = next(it for it in cluster.state.plans.values() if _begins(it.plan, first + 1, "loses"))
    results = {step.kind: healed.results[step.id] for step in healed.plan.steps}
    assert results[StepKind.LAUNCH]["from"] == "memory of 2 ranks"
    assert results[StepKind.RESUME]["went_on_after"] == results[StepKind.DRAIN]["iteration"]
    cluster.bring_back()
    cluster.check_journal()


def _begins(plan, generation: int, job: str = "parks") -> bool:
    own = plan.assignment_of(job)
    return own is not None and own.generation == generation
