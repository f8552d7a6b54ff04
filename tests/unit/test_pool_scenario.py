"""Scenarios with money: pools in the place of a cluster, and the outlook that prices alternatives."""

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
from unicron_lib.planning import pool_scenario

EXAMPLES = Path(__file__).parents[2] / "infra/scenarios"
app = typer.Typer()
app.command()(plan)


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "pools.yaml").read_text())
    return loaded


def run(tmp_path: Path, scenario: dict[str, Any], *options: str) -> Any:
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(scenario))
    return CliRunner().invoke(app, [str(file), *options])


def changed(path: str, value: Any) -> dict[str, Any]:
    """The example with `value` at a path such as `jobs/0/pool`; None takes the key away."""
    made = copy.deepcopy(document())
    *way, last = (int(part) if part.isdecimal() else part for part in path.split("/"))
    at: Any = made
    for part in way:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return made


def test_rebalancing_uses_spot_to_stay_within_the_budget(tmp_path: Path) -> None:
    answer = json.loads(run(tmp_path, document(), "--json").stdout)
    assert answer["pool"] == {"gpt-13b": "h100", "gpt-7b": "a100", "evaluation": "a100-spot"}
    assert answer["optimal"] is True
    assert answer["dollars_per_h"] == pytest.approx(24 * 6.9 + 32 * 3.4 + 8 * 1.3)
    assert "Dollars an hour: 329.60 -> 284.80 of a budget of 290" in answer["reason"]
    rich = json.loads(run(tmp_path, changed("budget_dollars_per_h", None), "--json").stdout)
    assert rich["pool"]["evaluation"] == "a100"


def test_a_recovery_keeps_jobs_in_their_pools(tmp_path: Path) -> None:
    answer = json.loads(run(tmp_path, changed("rebalance", False), "--json").stdout)
    assert answer["gpus"] == {"gpt-13b": 24, "gpt-7b": 32, "evaluation": 0}
    assert "In no pool, so that only rebalancing starts them: evaluation" in answer["reason"]
    shown = run(tmp_path, changed("rebalance", False))
    assert shown.exit_code == 0
    assert "32 in h100" in shown.stdout


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("jobs/0/pool", "v100", "job gpt-13b: there is no pool v100, the pools are h100, a100, a100-spot"),
        ("jobs/0/pool", None, "job gpt-13b: it has current_gpus, but the key pool does not say where"),
        ("jobs/0/transition_s", None, "job gpt-13b: transition_s is missing"),
        ("jobs/0/min_gpus", 49, "job gpt-13b: min_gpus 49 is greater than every size"),
        ("jobs/0/max_gpus", 8, "job gpt-13b: min_gpus 16 is greater than max_gpus 8"),
        ("jobs/0/weight", -1, "job gpt-13b: weight is -1: input should be greater than 0"),
        ("jobs/1/job", "gpt-13b", "job gpt-13b: the name is used more than once"),
        ("jobs/0/current_gpus", 40, "pool h100: current_gpus add up to 40, it has only 32 GPUs"),
        ("pools/h100/lost_nodes", 5, "pool h100: lost_nodes is 5, it has only num_nodes: 4"),
        ("pools/h100/dollars_per_gpu_h", float("nan"), "dollars_per_gpu_h of h100 of pools is nan"),
        ("quotas_gpus", {"nobody": 3}, "quotas_gpus names nobody, which is the tenant of no job"),
        ("cluster", {}, "the key cluster is unknown"),
        ("jobs/0/throughput_flops/h100", {}, "throughput_flops"),
    ],
)
def test_a_broken_scenario_is_one_clear_sentence(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        pool_scenario.parse(changed(path, value))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_exit_code_3(tmp_path: Path) -> None:
    tight = changed("jobs/0/must_run", True) | {"budget_dollars_per_h": 1.0}
    refused = run(tmp_path, tight, "--json")
    assert refused.exit_code == 3
    assert json.loads(refused.stdout)["error"] == "infeasible"


def test_pools_lose_nodes_and_jobs_end(tmp_path: Path) -> None:
    lost = [part for _ in range(4) for part in ("--lose", "a100-spot")]
    answer = json.loads(run(tmp_path, document(), *lost, "--json").stdout)
    assert "Lost nodes: 1 of h100, 4 of a100-spot" in answer["reason"]
    assert "a100-spot" not in answer["pool"].values()
    alone = json.loads(run(tmp_path, document(), "--finish", "gpt-7b", "--finish", "evaluation", "--json").stdout)
    assert set(alone["gpus"]) == {"gpt-13b"}
    for options in (("--lose", "1"), ("--join", "1"), ("--finish", "nobody")):
        refused = run(tmp_path, document(), *options)
        assert refused.exit_code == 2
        assert refused.output.count("\n") == 1


def test_a_loss_with_an_outlook_has_alternatives_and_one_is_best() -> None:
    file = str(EXAMPLES / "replace-or-wait.yaml")
    answer = json.loads(CliRunner().invoke(app, [file, "--lose", "node-1", "--json"]).stdout)
    assert [it["kind"] for it in answer["alternatives"]] == ["wait", "shrink", "take", "replace"]
    assert [it["kind"] for it in answer["alternatives"] if it["best"]] == ["take"]
    assert answer["alternatives"][2]["gpus"] == answer["gpus"]
    assert "alternatives" not in json.loads(CliRunner().invoke(app, [file, "--json"]).stdout)
    shown = CliRunner().invoke(app, [file, "--lose", "node-1"]).stdout
    assert "Best: take: GPUs gpt-1b 24 -> 16, gpt-13b on other nodes for 14400 s" in shown


def test_a_bad_outlook_is_one_clear_sentence(tmp_path: Path) -> None:
    scenario = yaml.safe_load((EXAMPLES / "replace-or-wait.yaml").read_text())
    scenario["outlook"]["repair_s"] = -1
    refused = run(tmp_path, scenario)
    assert refused.exit_code == 2
    assert "repair_s of outlook is -1" in refused.output
