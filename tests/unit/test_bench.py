"""`unicron bench planner`: its figures on small clusters, and what it prints."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from unicron_lib.cli import bench, planner_figures
from unicron_lib.cli.planner_figures import Figure

FAST = Figure(what="a thing", median_s=0.002, worst_s=0.004, cpu_s=0.001, bar_s=0.01, ratio=12.0, against="another thing")


def run(monkeypatch: pytest.MonkeyPatch, figures: list[Figure], *options: str) -> typer.testing.Result:
    def stand_in() -> Iterator[Figure]:
        yield from figures

    monkeypatch.setattr(bench, "_figures", stand_in)
    return CliRunner().invoke(bench.group, ["planner", *options])


def test_json_is_one_object_with_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, [FAST], "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    (figure,) = found["figures"]
    keys = {"what", "median_s", "worst_s", "cpu_s", "bar_s", "ratio", "against", "gap", "is_right", "ok"}
    assert set(figure) == keys


@pytest.mark.parametrize("bad", [{"median_s": 0.011}, {"gap": 1e-9}, {"is_right": False}])
def test_a_missed_bar_a_gap_or_a_wrong_answer_fails(monkeypatch: pytest.MonkeyPatch, bad: dict[str, float]) -> None:
    result = run(monkeypatch, [FAST, replace(FAST, **bad)])
    assert result.exit_code == 1
    assert "MISSED" in result.stdout
    assert ("WRONG" in result.stdout) == ("median_s" not in bad)


def test_people_get_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, [FAST])
    assert "2.0 ms" in result.stdout
    assert "12 x the speed of another thing" in result.stdout


def test_small_clusters_are_solved_right_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_figures, "NUM_SEEDS", 2)
    figures = [
        planner_figures.allocations(num_jobs=4, num_gpus=16, bar_s=60.0),
        *planner_figures.tables(num_jobs=4, num_gpus=32, largest=16, bar_s=60.0, lookup_bar_s=60.0),
        planner_figures.placements(num_jobs=4, num_nodes=4, bar_s=60.0),
    ]
    assert all(figure.ok for figure in figures)
    assert all(figure.worst_s >= figure.median_s > 0 for figure in figures)


def test_the_first_plan_of_a_process_is_one_of_the_solver() -> None:
    assert planner_figures.cold_process(bar_s=60.0).ok
