"""`unicron plan FILE` with what may happen next, the comparison of plans, the picture, and the documented examples."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import typer
import yaml
from typer.testing import CliRunner

from unicron_lib.cli.plan import plan
from unicron_lib.planning import picture

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "infra/scenarios").glob("*.yaml"))
SCENARIO = {
    "cluster": {"num_nodes": 4, "gpus_per_node": 4, "mtbf_gpu_s": 1e6},
    "lost_nodes": 1,
    "nodes": {"n1": ["a"], "n2": ["a", "b"]},
    "granularity_gpus": 1,
    "jobs": [
        {"job": "a", "current_gpus": 6, "transition_s": 10, "throughput_flops": {4: 4e12, 6: 6e12, 8: 7e12}},
        {"job": "b", "current_gpus": 2, "transition_s": 10, "throughput_flops": {2: 2e12, 4: 3.9e12, 8: 7.6e12}},
    ],
}
app = typer.Typer()
app.command()(plan)


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    (tmp_path / "job.yaml").write_text("{job: c, weight: 9.0, throughput_flops: {4: 1.0e+13}}")
    return tmp_path


def ask(*options: str) -> Any:
    return CliRunner().invoke(app, ["scenario.yaml", *options])


def answer(*options: str) -> Any:
    result = ask(*options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_reason_begins_with_what_was_asked(at: Path) -> None:
    asked = ("--lose", "1", "--lose", "n1", "--finish", "b", "--launch", "job.yaml", "--join", "2")
    begin = "What if 1 node is lost, n1 is lost, 2 nodes join, b ends, c begins: 1 node is lost, a worker of a failed."
    assert answer(*asked)["reason"].startswith(begin)
    assert not answer()["reason"].startswith("What if")


def test_nothing_asked_is_the_scenario_as_it_is(at: Path) -> None:
    assert answer()["gpus"] == {"a": 4, "b": 8}
    assert "No node is lost" not in answer()["reason"]


def test_a_node_that_is_lost_by_name_hits_the_jobs_on_it(at: Path) -> None:
    reason = answer("--lose", "n2")["reason"]
    assert "2 nodes are lost, a worker of a, b failed. 8 of 16 GPUs can be used." in reason


def test_nodes_that_are_lost_by_number_hit_nobody(at: Path) -> None:
    reason = answer("--lose", "1")["reason"]
    assert "2 nodes are lost. 8 of 16 GPUs can be used." in reason


def test_losses_add_up(at: Path) -> None:
    assert "3 nodes are lost, a worker of a failed. 4 of 16" in answer("--lose", "1", "--lose", "n1")["reason"]


def test_nodes_that_join_bring_back_the_lost_ones_first(at: Path) -> None:
    assert "No node is lost. 16 of 16 GPUs" in answer("--join", "1")["reason"]
    assert "No node is lost. 24 of 24 GPUs" in answer("--join", "3")["reason"]


def test_the_gpus_of_a_job_that_ends_go_to_the_others(at: Path) -> None:
    assert answer("--finish", "b")["gpus"] == {"a": 8}


def test_a_job_that_begins_gets_its_share(at: Path) -> None:
    assert answer("--launch", "job.yaml")["gpus"] == {"a": 6, "b": 2, "c": 4}


def test_a_job_that_begins_may_be_a_deployment(at: Path) -> None:
    deployment = str(ROOT / "infra/jobs/gpt-a.yaml")
    assert answer("--launch", deployment, "--finish", "a")["gpus"] == {"b": 8, "gpt-a": 4}


def test_two_plans_are_compared(at: Path) -> None:
    now = answer()
    (at / "now.json").write_text(json.dumps(now))
    then = answer("--launch", "job.yaml", "--diff", "now.json")
    assert then["diff"]["gpus"] == {"a": [4, 6], "b": [8, 2], "c": [None, 4]}
    assert then["diff"]["moved_gpus"] == 6
    assert then["diff"]["gain"] == then["gain"] - now["gain"]
    shown = ask("--launch", "job.yaml", "--diff", "now.json").stdout
    assert "Against the other plan: GPUs: a 4 -> 6, b 8 -> 2, c none -> 4." in shown
    assert "Against the other plan: the same allocation." in ask("--diff", "now.json").stdout


def test_the_picture_shows_both_allocations_to_scale(at: Path) -> None:
    answer("--finish", "b", "--plot", "plan.svg")
    tree = ET.parse(at / "plan.svg")
    space = {"svg": "http://www.w3.org/2000/svg"}
    parts = {}
    for rectangle in tree.findall("svg:rect[svg:title]", space):
        title = rectangle.find("svg:title", space)
        assert title is not None
        parts[f"{title.text} at {rectangle.get('y')}"] = float(rectangle.get("width") or 0)
    widths = list(parts.items())
    assert [label.split(" at ")[0] for label, _ in widths] == [
        *("a: 6 GPUs", "b: 2 GPUs", "idle: 8 GPUs"),
        *("a: 8 GPUs", "idle: 4 GPUs", "lost: 4 GPUs"),
    ]
    assert widths[3][1] == pytest.approx(widths[0][1] * 8 / 6, abs=0.02)
    assert sum(width for _, width in widths[:3]) == pytest.approx(picture.WIDTH - 2 * picture.MARGIN, abs=0.1)


def test_names_in_the_picture_are_escaped() -> None:
    drawn = picture.draw({"<b>&": 4}, {"<b>&": 2}, total_gpus=4, num_gpus=4)
    assert "<b>" not in drawn
    ET.fromstring(drawn)


MISTAKES = [
    (["--lose", "n9"], "the scenario has no node n9: its nodes are n1, n2"),
    (["--lose", "2"], "2 nodes without a name cannot be lost, there are 1: name those that are: n1, n2"),
    (["--lose", "-1"], "the scenario has no node -1"),
    (["--lose", "n1", "--lose", "n1"], "the scenario has no node n1: its nodes are n2"),
    (["--join", "-1"], "-1 nodes cannot join, use --lose for losses"),
    (["--join", "1000000"], "num_nodes of cluster is 1000003:"),
    (["--finish", "x"], "the scenario has no job x: its jobs are a, b"),
    (["--finish", "a", "--finish", "a"], "the scenario has no job a: its jobs are b"),
    (["--finish", "a", "--finish", "b"], "jobs: tuple should have at least 1 item"),
    (["--launch", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory"),
    (["--launch", "list.yaml"], "list.yaml holds no job"),
    (["--launch", "scenario.yaml"], "job number 3: the key"),
    (["--launch", "job.yaml", "--launch", "job.yaml"], "job c: the name is used more than once"),
    (["--launch", "deployment.yaml"], "deployment.yaml must hold one deployment with parameters.job in it"),
    (["--launch", "bad.yaml"], "job c: weight is nan:"),
    (["--diff", "list.yaml"], "list.yaml is no plan"),
    (["--diff", "plan.json"], "plan.json is no plan: gpus and gain must be numbers"),
    (["--diff", "layout.json"], "layout.json is no plan: its layout"),
    (["--plot", "plan.png"], "plan.png cannot be drawn, the picture is an SVG: call it plan.svg"),
    (["--plot", "nowhere/plan.svg"], "nowhere/plan.svg cannot be written: No such file or directory"),
]


@pytest.mark.parametrize(("options", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_each_mistake_is_one_line(at: Path, options: list[str], sentence: str) -> None:
    (at / "list.yaml").write_text("[1, 2]")
    (at / "deployment.yaml").write_text("deployments: [{name: x}]")
    (at / "bad.yaml").write_text("{job: c, weight: .nan, throughput_flops: {4: 1.0e+13}}")
    (at / "plan.json").write_text('{"gpus": {"a": "many"}, "layout": {}, "gain": 1.0}')
    (at / "layout.json").write_text('{"gpus": {"a": 1}, "layout": {"a": 3}, "gain": 1.0}')
    result = ask(*options, "--json")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith(f"Error: {sentence}"), result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ({"n1": ["x"]}, "node n1: there is no job x, the jobs are a, b"),
        ({f"n{n}": [] for n in range(4)}, "nodes names 4 nodes, only 3 are healthy"),
        ({"n1": "a"}, "n1 of nodes is 'a': input should be a valid tuple"),
    ],
)
def test_nodes_that_do_not_fit_are_one_line(at: Path, nodes: Any, sentence: str) -> None:
    (at / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO | {"nodes": nodes}))
    result = ask()
    assert (result.exit_code, result.stderr.splitlines()) == (2, [result.stderr.strip()])
    assert result.stderr.startswith(f"Error: {sentence}")


@pytest.mark.parametrize("text", ["[" * 5000, "{" * 5000])
def test_a_bottomless_file_is_one_line(at: Path, text: str) -> None:
    (at / "scenario.yaml").write_text(text)
    result = ask()
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_there_are_three_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_commands_in_the_examples_do_what_their_comments_say(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.findall(r"^# {3}unicron plan ([^#>\n]*)(?:> (\S+))?(?:# (.*))?$", example.read_text(), re.MULTILINE)
    assert len(lines) >= 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    for command, target, comment in lines:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == (3 if "infeasible" in comment else 0), result.output
        if target:
            Path(target).write_text(result.stdout)
        if "nothing" in comment:
            assert not re.search(r"│ +(\d+) │ +(?!\1 )\d+ │", result.stdout)
