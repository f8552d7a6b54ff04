"""The scenario file and the command `unicron plan`."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from unicron_lib.cli.plan import plan
from unicron_lib.errors import UserError
from unicron_lib.planning import scenario

TABLE = {16: 2.1e15, 24: 3.0e15, 32: 4.1e15, 48: 5.9e15, 64: 7.9e15}
TEXT = """
cluster: {num_nodes: 16, gpus_per_node: 8, mtbf_gpu_s: 6.2e7}
lost_nodes: 1
granularity_gpus: 8
jobs:
  - job: gpt-7b
    weight: 1.0
    current_gpus: 32
    faulted: true
    min_gpus: 16
    max_gpus: 64
    must_run: false
    transition_s: 120
    throughput_flops: {16: 2.1e15, 24: 3.0e15, 32: 4.1e15, 48: 5.9e15, 64: 7.9e15}
  - job: gpt-13b
    weight: 2.0
    current_gpus: 64
    min_gpus: 16
    transition_s: 300
    throughput_flops: {16: 1.9e15, 32: 3.9e15, 64: 7.2e15}
"""
KEYS = {"gpus", "layout", "gain", "upper_bound", "gap", "optimal", "method", "solve_s", "reason"}

app = typer.Typer()
app.command()(plan)


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEXT)
    return loaded


def run(tmp_path: Path, text: str, *options: str) -> Any:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    return CliRunner().invoke(app, [str(file), *options])


def broken(**changes: Any) -> dict[str, Any]:
    """The scenario with `changes` to its first job; None takes a key away."""
    made = copy.deepcopy(document())
    for key, value in changes.items():
        made["jobs"][0][key] = value
        if value is None:
            del made["jobs"][0][key]
    return made


def test_json_has_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    result = run(tmp_path, TEXT, "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(answer) == KEYS
    assert answer["gpus"] == {"gpt-13b": 64, "gpt-7b": 48}
    assert answer["layout"] == {"gpt-13b": {"tp": 1, "pp": 1, "dp": 64}, "gpt-7b": {"tp": 1, "pp": 1, "dp": 48}}
    assert answer["optimal"] is True
    expected_s = 6.2e7 / 120
    assert answer["gain"] == pytest.approx(2 * 7.2e15 * expected_s + 5.9e15 * expected_s - 4.1e15 * 120)
    assert "120 of 128 GPUs can be used. GPUs: gpt-13b 64 -> 64, gpt-7b 32 -> 48." in answer["reason"]


def test_json_files_with_string_keys_and_tabs_are_read(tmp_path: Path) -> None:
    as_json = json.dumps(document(), indent="\t")
    assert '"16"' in as_json
    assert json.loads(run(tmp_path, as_json, "--json").stdout)["gpus"] == {"gpt-13b": 64, "gpt-7b": 48}


def test_people_get_a_table_and_the_reason(tmp_path: Path) -> None:
    result = run(tmp_path, TEXT)
    assert result.exit_code == 0
    assert "gpt-7b" in result.stdout
    assert "1 node is lost, a worker of gpt-7b failed." in result.stdout
    assert "optimum" in result.stdout


def test_infeasible_is_exit_code_3_with_figures(tmp_path: Path) -> None:
    impossible = document()
    impossible["lost_nodes"] = 12
    for job in impossible["jobs"]:
        job.update(must_run=True, min_gpus=32)
    text = yaml.safe_dump(impossible)
    result = run(tmp_path, text, "--json")
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    assert {key: answer[key] for key in ("error", "required", "available")} == {
        "error": "infeasible",
        "required": 64,
        "available": 32,
    }
    assert "gpt-13b at least 32" in answer["message"]
    human = run(tmp_path, text)
    assert (human.exit_code, human.stdout) == (3, "")
    assert human.stderr.startswith("Infeasible: the jobs that must run need 64 GPUs")


SENTENCES = [
    (broken(wait=1), "job gpt-7b: the key wait is unknown"),
    (broken(throughput_flops=None), "job gpt-7b: the key throughput_flops is missing"),
    (broken(job=None), "job number 1: the key job is missing"),
    (broken(transition_s=None), "job gpt-7b: transition_s is missing"),
    (broken(min_gpus=80), "job gpt-7b: min_gpus 80 is greater than max_gpus 64"),
    (broken(min_gpus=80, max_gpus=None), "job gpt-7b: min_gpus 80 is greater than every size in throughput_flops"),
    (broken(weight=-1), "job gpt-7b: weight is -1: input should be greater than 0"),
    (broken(weight=float("nan")), "job gpt-7b: weight is nan: input should be"),
    (broken(throughput_flops={16: float("nan")}), "job gpt-7b: 16 of throughput_flops is nan: input should be"),
    (broken(throughput_flops={16: -2.0}), "job gpt-7b: 16 of throughput_flops is -2.0: input should be"),
    (broken(throughput_flops={"many": 2.0}), "job gpt-7b: many of throughput_flops is 'many': input should be a valid integer"),
    (broken(throughput_flops={}), "job gpt-7b: throughput_flops is empty"),
    (broken(current_gpus=128), "current_gpus add up to 192, the cluster has only 128 GPUs"),
    (broken(job="gpt-13b"), "job gpt-13b: the name is used more than once"),
    (document() | {"lost_nodes": 17}, "lost_nodes is 17, the cluster has only num_nodes: 16"),
    (document() | {"granularity_gpus": 0}, "granularity_gpus is 0: input should be greater than or equal to 1"),
    (document() | {"jobs": []}, "jobs: tuple should have at least 1 item"),
    (document() | {"cluster": {"num_nodes": 2}}, "the key gpus_per_node of cluster is missing"),
    (
        document() | {"cluster": {"num_nodes": 10**9, "gpus_per_node": 8, "mtbf_gpu_s": 1.0}},
        "num_nodes of cluster is 1000000000:",
    ),
    ({"jobs": document()["jobs"]}, "the key cluster is missing"),
    (document() | {"jobs": [3]}, "job number 1:"),
    (["jobs"], "a scenario is a mapping"),
    (None, "a scenario is a mapping"),
]


@pytest.mark.parametrize(("made", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_each_mistake_gets_one_sentence_that_names_it(tmp_path: Path, made: object, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        scenario.parse(made)
    assert str(refused.value).startswith(sentence)
    result = run(tmp_path, yaml.safe_dump(made), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {sentence}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["a: [1", "a: 1\na: 2", '{"a": 1, "a": 2}', "\x00", "a: !!python/object:os.system {}"])
def test_a_file_that_cannot_be_parsed_is_one_line(tmp_path: Path, text: str) -> None:
    result = run(tmp_path, text)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_figures_that_overflow_are_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, yaml.safe_dump(broken(weight=1e300)), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "more than a float can hold" in result.stderr


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "nowhere.yaml")])
    assert result.exit_code == 2
    assert "nowhere.yaml cannot be read: No such file or directory" in result.stderr
    assert CliRunner().invoke(app, [str(tmp_path)]).exit_code == 2


def test_sizes_that_are_no_multiple_of_the_granularity_are_not_offered() -> None:
    made = document() | {"granularity_gpus": 32}
    answer = scenario.answer(scenario.parse(made), timer=lambda: 0.0)
    assert all(num_gpus % 32 == 0 for num_gpus in answer["gpus"].values())


def test_the_granularity_is_a_node_unless_it_is_given() -> None:
    made = document()
    del made["granularity_gpus"]
    made["jobs"][0]["throughput_flops"][60] = 9e15
    answer = scenario.answer(scenario.parse(made), timer=lambda: 0.0)
    assert answer["gpus"] == {"gpt-13b": 64, "gpt-7b": 48}


def test_a_present_size_that_is_not_in_the_table_is_said_to_be_unknown() -> None:
    answer = scenario.answer(scenario.parse(broken(current_gpus=40)), timer=lambda: 0.0)
    assert "The present throughput of gpt-7b is not in the table" in answer["reason"]


def test_without_time_the_answer_has_a_gap_or_is_proved() -> None:
    answer = scenario.answer(scenario.parse(document() | {"time_limit_s": 0}), timer=lambda: 0.0)
    assert answer["upper_bound"] >= answer["gain"]
    assert answer["optimal"] == (answer["gap"] == 0.0)
