"""Jobs that run a command of their owner's: what they may say, and what is decided about them."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from unicron_lib.agent.command_process import enter, find_program
from unicron_lib.agent.command_rank import command_environment, last_traceback, working_directory
from unicron_lib.agent.environment import NodeFacts, rank_environment
from unicron_lib.agent.messages import LaunchRanks
from unicron_lib.domain.budget import answered, failed
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec, JobState
from unicron_lib.domain.plans import Assignment, Layout, Slot
from unicron_lib.errors import UserError
from unicron_lib.jobfile import TRAIN, read_deployments, read_jobs
from unicron_lib.planning.throughput import profiles, table
from unicron_lib.planning.transition_cost import move_of

LOG = """step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: an earlier one, which was caught
step 2
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank1]:     step()
[rank1]: torch.OutOfMemoryError: CUDA out of memory
"""
SPEC = JobSpec(job="a", command=("python", "train.py"), min_gpus=16, max_gpus=32)


def launch(spec: JobSpec, generation: int = 3) -> LaunchRanks:
    return LaunchRanks(
        step="s",
        job=spec.job,
        generation=generation,
        spec=spec,
        layout=Layout(dp=4),
        ranks=((2, 0), (3, 1)),
        world_size=4,
        node_rank=1,
        num_nodes=2,
        master_addr="10.0.0.1",
        master_port=29500,
        store_url="file:///nowhere",
    )


def environment(tmp_path: Path, spec: JobSpec) -> dict[str, str]:
    facts = NodeFacts(node="n", address="10.0.0.2", num_gpus=2, run_dir=tmp_path)
    command = launch(spec)
    return command_environment(facts, command, rank_environment(facts, command, 3, tmp_path / "s"))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"command": (" ", "x")}, "command has no program"),
        ({"command": ("python",), "num_layers": 3}, "knows nothing of num_layers"),
        ({"command": ("python",), "train_iters": 3, "lr": 0.1}, "knows nothing of train_iters, lr"),
        ({"working_dir": "/x"}, "working_dir means nothing without a command"),
        ({"parks": True}, "parks means nothing without a command"),
        ({"env": {"A": "1"}, "checkpoint_dir": "x"}, "env, checkpoint_dir means nothing without a command"),
        ({"command": ("python",), "repair_tracker": True}, "repair_tracker needs a checkpoint_dir"),
        ({"command": ("python",), "env": {"RANK": "1", "UNICRON_NODE": "x"}}, "env sets RANK, UNICRON_NODE"),
        ({"command": ("python",), "env": {"A=B": "1"}}, "env maps names of variables"),
        ({"command": ("python", "a\0b")}, "NUL"),
    ],
)
def test_a_mistake_is_one_sentence(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JobSpec(job="a", **keys)


def test_how_a_command_shares_its_batch_is_its_own_business() -> None:
    assert SPEC.sizes(64) == tuple(range(16, 33))
    assert SPEC.admits(32)
    assert not SPEC.guards_loss


def test_without_a_table_twice_the_gpus_are_twice_as_fast() -> None:
    flops = table(SPEC, profiles([SPEC], {})["a"], num_gpus=32)
    assert flops[32] == pytest.approx(2 * flops[16])
    assert flops[16] > 0
    measured = table(SPEC, profiles([SPEC], {"a": {16: 5e9}})["a"], num_gpus=32)
    assert measured == {size: pytest.approx(size * 5e9 / 16) for size in range(16, 33)}
    assert move_of(SPEC, 1e9).base_s == SPEC.transition_s


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python train.py", "command is 'python train.py': write a list"),
        ([], "command is empty"),
        (["python", "train.py", 3], "command has 3, which is no text: put it into quotes"),
    ],
)
def test_a_command_that_yaml_reads_as_something_else_is_refused(tmp_path: Path, command: object, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_jobs(job_file(tmp_path, command=command))


def test_a_relative_directory_is_relative_to_the_jobs_file(tmp_path: Path) -> None:
    path = job_file(tmp_path, command=["python", "train.py"], working_dir="code", env={"LEVEL": "1"})
    (spec,) = read_jobs(path)
    assert spec.working_dir == str(tmp_path / "code")
    (entry,) = read_deployments(path)
    assert entry["parameters"]["job"]["working_dir"] == spec.working_dir, "as Prefect is told"


def job_file(folder: Path, **keys: object) -> Path:
    path = folder / "a.yaml"
    entry = {"name": "a", "entrypoint": TRAIN, "parameters": {"job": {"job": "a", **keys}}}
    path.write_text(yaml.safe_dump({"deployments": [entry]}))
    return path


def test_a_rank_finds_what_torchrun_would_tell_it(tmp_path: Path) -> None:
    found = environment(tmp_path, SPEC)
    assert found["RANK"] == "3"
    assert (found["LOCAL_RANK"], found["WORLD_SIZE"], found["GROUP_RANK"]) == ("1", "4", "1")
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("3", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert found["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert Path(found["UNICRON_WORKING_DIR"]) == tmp_path / "work" / "a"
    assert Path(found["UNICRON_WORKING_DIR"]).is_dir()


def test_nccl_ends_only_processes_that_do_not_park(tmp_path: Path) -> None:
    usual, parks = environment(tmp_path, SPEC), environment(tmp_path, replace(SPEC, parks=True))
    assert (usual["TORCH_NCCL_ASYNC_ERROR_HANDLING"], usual.get("TORCH_NCCL_BLOCKING_WAIT")) == ("1", None)
    assert (parks["TORCH_NCCL_ASYNC_ERROR_HANDLING"], parks["TORCH_NCCL_BLOCKING_WAIT"]) == ("0", "1")


def test_the_owners_variables_are_there_and_may_replace_what_is_only_a_default(tmp_path: Path) -> None:
    found = environment(tmp_path, replace(SPEC, env={"LEVEL": "1", "PYTHONUNBUFFERED": ""}))
    assert (found["LEVEL"], found["PYTHONUNBUFFERED"]) == ("1", "")


def test_a_named_directory_is_kept(tmp_path: Path) -> None:
    facts = NodeFacts(node="n", address="x", num_gpus=1, run_dir=tmp_path)
    assert working_directory(facts, replace(SPEC, working_dir="/data/code")) == Path("/data/code")


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is relative"):
        enter("code")
    with pytest.raises(UserError, match="cannot be entered"):
        enter(str(tmp_path / "none"))
    with pytest.raises(UserError, match="the program 'no-such-program' was not found"):
        find_program(["no-such-program"])
    with pytest.raises(UserError, match=r"there is no train\.py in"):
        find_program(["python", "train.py"])
    (tmp_path / "train.py").touch()
    assert Path(find_program(["python", "train.py"])).is_file()
    assert find_program(["python", "-m", "train"])


def test_the_last_traceback_of_a_log_is_the_evidence() -> None:
    first, *rest = last_traceback(LOG).splitlines()
    assert first == "OutOfMemoryError: CUDA out of memory"
    assert rest[1] == '  File "train.py", line 7, in <module>'
    assert last_traceback("all is well\n") == ""


# --- when enough is enough ---------------------------------------------------------------------------------------------


def crash(at: float, iteration: int = -1) -> Failure:
    return Failure(
        id=f"f{at}", kind=ErrorKind.PROCESS_EXIT, method=DetectionMethod.PROCESS, seen_at=at, job="a", iteration=iteration
    )


def after_crashes(spec: JobSpec, times: list[float]) -> JobState:
    job = JobState(spec=spec)
    for at in times:
        job = answered(failed(job, crash(at), counts=True), crash(at), at)
    return job


def test_a_command_that_tells_nothing_may_crash_again_after_a_while_but_not_at_once() -> None:
    spec = replace(SPEC, restart_window_s=100.0)
    assert after_crashes(spec, [0.0, 1.0, 2.0]).stuck_restarts == 2
    assert after_crashes(spec, [0.0, 200.0, 400.0, 600.0]).stuck_restarts == 0
    assert after_crashes(JobSpec(job="a", restart_window_s=100.0), [0.0, 200.0, 400.0]).stuck_restarts == 2


def test_a_job_is_done_when_all_ranks_of_its_generation_are() -> None:
    slots = (Slot("n", 0), Slot("n", 1))
    placed = Assignment(job="a", generation=2, layout=Layout(dp=2), slots=slots)
    job = JobState(spec=SPEC, generation=2, assignment=placed, done_ranks=((1, 1), (2, 0)))
    assert not job.is_done
    assert replace(job, done_ranks=((2, 0), (2, 1))).is_done
    assert not replace(job, generation=3, done_ranks=((2, 0), (2, 1))).is_done
