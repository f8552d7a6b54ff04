"""The ledger tells what was consumed, and its check finds what is wrong."""

from pathlib import Path

import pytest

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError
from unicron_lib.training.data import open_corpus, sample_order
from unicron_lib.training.ledger import Entry, Ledger, check_ledger, read_lineage

SPEC = JobSpec(job="a", train_iters=6, global_batch_size=4)
ORDER = sample_order(SPEC, open_corpus(SPEC))


def record(directory: Path, iterations: range, *, generation: int = 1, rank: int = 0, loss: float = 1.0) -> None:
    with Ledger(directory, generation=generation, rank=rank) as ledger:
        for iteration in iterations:
            ledger.write(Entry(iteration=iteration, samples=ORDER.samples(iteration), loss=loss))


def test_an_undisturbed_run_has_no_problems(tmp_path: Path) -> None:
    record(tmp_path, range(6))
    record(tmp_path, range(6), rank=1)
    assert check_ledger(tmp_path, SPEC) == []


def test_recomputed_iterations_count_once_by_the_newest_generation(tmp_path: Path) -> None:
    record(tmp_path, range(5), generation=1)
    record(tmp_path, range(2, 4), generation=2, loss=2.0)
    record(tmp_path / "other-node", range(3, 6), generation=10, loss=3.0)
    assert check_ledger([tmp_path, tmp_path / "other-node"], SPEC) == []
    lineage, _ = read_lineage(tmp_path, tmp_path / "other-node")
    assert [entry.loss for entry in lineage.values()] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_a_lost_iteration_is_found(tmp_path: Path) -> None:
    record(tmp_path, range(3))
    record(tmp_path, range(4, 6), generation=2)
    assert check_ledger(tmp_path, SPEC) == ["iteration 3 was never completed"]


def test_wrong_and_doubled_samples_are_found(tmp_path: Path) -> None:
    record(tmp_path, range(5))
    with Ledger(tmp_path, generation=1, rank=0) as ledger:
        ledger.write(Entry(iteration=5, samples=[-2, *ORDER.samples(5)[1:]], loss=1.0))
    assert [problem[:20] for problem in check_ledger(tmp_path, SPEC)] == ["iteration 5 consumed"]


def test_ranks_that_disagree_are_found(tmp_path: Path) -> None:
    record(tmp_path, range(6))
    record(tmp_path, range(1), rank=1, loss=1.5)
    assert check_ledger(tmp_path, SPEC) == ["iteration 0: ranks of generation 1 saw different samples or losses"]


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    record(tmp_path, range(6))
    (tmp_path / "g2-r0.jsonl").write_bytes(b'{"iteration":0,"samples":[1')
    assert check_ledger(tmp_path, SPEC) == []
    (tmp_path / "g2-r0.jsonl").write_bytes(b'{"iteration":0,"samples":[1\n')
    assert check_ledger(tmp_path, SPEC) == ["g2-r0.jsonl line 1 is damaged"]


def test_iterations_beyond_the_last_are_found(tmp_path: Path) -> None:
    record(tmp_path, range(7))
    assert check_ledger(tmp_path, SPEC) == ["iteration 6 is beyond train_iters"]


def test_the_built_in_text_gives_several_hundred_samples() -> None:
    assert 300 < open_corpus(SPEC).num_samples < 1000


@pytest.mark.parametrize(
    ("content", "changes", "sentence"),
    [
        (None, {}, "cannot be read: No such file or directory"),
        (b"short", {}, "has 5 bytes, too few for seq_length 64"),
        (bytes([200]) * 100, {"vocab_size": 128}, "has the byte 200, vocab_size 128 ends below it"),
    ],
)
def test_a_text_that_does_not_do_is_one_sentence(tmp_path: Path, content: bytes | None, changes: dict, sentence: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^job 'a': .*{sentence}$"):
        open_corpus(JobSpec(job="a", data_path=str(path), **changes))


def test_an_unknown_built_in_text_names_those_there_are() -> None:
    with pytest.raises(UserError, match=r"there is no builtin:plays, only builtin:sonnets"):
        open_corpus(JobSpec(job="a", data_path="builtin:plays"))
