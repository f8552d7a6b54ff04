"""Megatron-LM's checkpoint directories: what it would resume from, what is complete, and what a crash leaves."""

from pathlib import Path

import pytest

from unicron_lib.checkpointing.megatron_layout import Checkpoints, read_layout
from unicron_lib.checkpointing.megatron_tracker import look, tell_and_repair


def torch_format(iteration: int, *parts: str, optimizer: bool = True) -> dict[str, int]:
    names = ("model_optim_rng.pt", *(("distrib_optim.pt",) if optimizer else ()))
    return {f"iter_{iteration:07d}/mp_rank_{part}/{name}": 10 for part in parts for name in names}


def torch_dist(iteration: int, *, num_ranks: int = 2) -> dict[str, int]:
    names = (".metadata", "metadata.json", "common.pt", *(f"__{rank}_0.distcp" for rank in range(num_ranks)))
    return {f"iter_{iteration:07d}/{name}": 10 for name in names}


def problems(found: Checkpoints) -> dict[int, str]:
    return {saved.iteration: saved.problem for saved in found.saved}


def test_a_healthy_directory() -> None:
    found = read_layout(torch_format(10, "00", "01") | torch_format(20, "00", "01"), "20\n")
    assert (found.resumes_from, found.newest_complete, found.problem) == (20, 20, "")
    assert found.repaired_tracker is None


@pytest.mark.parametrize(
    "parts", [("00",), ("00", "01"), ("00_000", "00_001", "01_000", "01_001"), ("00_000_000", "00_000_001")]
)
def test_the_formats_names(parts: tuple[str, ...]) -> None:
    assert problems(read_layout(torch_format(5, *parts), "5")) == {5: ""}
    assert problems(read_layout(torch_format(5, *parts, optimizer=False), "5")) == {5: ""}


def test_a_distributed_checkpoint_is_complete_with_its_metadata() -> None:
    files = torch_dist(5) | torch_dist(10) | torch_dist(15)
    del files["iter_0000010/.metadata"]
    for rank in range(2):
        del files[f"iter_0000015/__{rank}_0.distcp"]
    found = read_layout(files, "10")
    assert problems(found) == {5: "", 10: "which lacks .metadata", 15: "which lacks *.distcp"}
    assert found.problem.endswith("points to iteration 10, which lacks .metadata")
    assert found.repaired_tracker == "5"


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ("iter_0000020/mp_rank_00_001/distrib_optim.pt", "whose part mp_rank_0_1 lacks a file"),
        ("iter_0000020/mp_rank_01_000/", "which has 3 of 4 parts mp_rank_*"),
    ],
)
def test_what_a_crash_while_saving_leaves(left_out: str, told: str) -> None:
    parts = ("00_000", "00_001", "01_000", "01_001")
    files = torch_format(10, *parts) | torch_format(20, *parts)
    files = {path: size for path, size in files.items() if not path.startswith(left_out)}
    found = read_layout(files, "10")
    assert problems(found) == {10: "", 20: told}
    assert (found.resumes_from, found.newest_complete, found.problem) == (10, 10, "")


def test_an_empty_file_is_no_file() -> None:
    files = torch_format(10, "00") | {"iter_0000020/mp_rank_00/model_optim_rng.pt": 0}
    assert problems(read_layout(files, "10"))[20] == "whose iter_0000020/mp_rank_00/model_optim_rng.pt is empty".replace(
        "iter_0000020/", ""
    )


def test_the_last_parts_may_be_missing_only_if_the_tracker_vouches_for_it() -> None:
    files = torch_format(10, "00", "01") | torch_format(20, "00")
    assert problems(read_layout(files, "10"))[20] == "which has 1 parts mp_rank_*, those before it 2"
    assert problems(read_layout(files, "20"))[20] == "", "it was saved with another layout"


@pytest.mark.parametrize(
    ("tracker", "problem", "repaired"),
    [
        ("30", "points to iteration 30, which is not there", "20"),
        ("", "says '', which Megatron cannot read", "20"),
        ("2x", "says '2x', which Megatron cannot read", "20"),
        ("release", "", None),
        (None, "there is no latest_checkpointed_iteration.txt, so that it begins anew", None),
    ],
)
def test_a_tracker_that_points_nowhere(tracker: str | None, problem: str, repaired: str | None) -> None:
    found = read_layout(torch_format(10, "00") | torch_format(20, "00"), tracker)
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
    assert found.repaired_tracker == repaired


def test_nothing_is_there_yet() -> None:
    found = read_layout({}, None)
    assert (found.resumes_from, found.newest_complete, found.problem, found.repaired_tracker) == (None, None, "", None)


# --- on disk ------------------------------------------------------------------------------------------------------------


def written(directory: Path, files: dict[str, int], tracker: str) -> Path:
    for name, size in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (directory / "latest_checkpointed_iteration.txt").write_text(tracker)
    return directory


def test_a_tracker_is_told_and_left_alone(tmp_path: Path) -> None:
    directory = written(tmp_path, torch_dist(10), "20")
    told = tell_and_repair(directory, may_repair=False)
    assert "points to iteration 20, which is not there; the newest complete one is iteration 10" in told
    assert look(directory).tracker == "20"


def test_a_tracker_is_put_back_if_that_is_wanted(tmp_path: Path) -> None:
    directory = written(tmp_path, torch_dist(10), "20")
    assert tell_and_repair(directory, may_repair=True).endswith("; put back to iteration 10")
    assert look(directory).tracker == "10"
    assert tell_and_repair(directory, may_repair=True) == "Megatron goes on from iteration 10"
    assert sorted(path.name for path in directory.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_a_directory_that_is_not_there_yet_is_no_mistake(tmp_path: Path) -> None:
    assert tell_and_repair(tmp_path / "none", may_repair=True) == "there is no checkpoint yet"
