"""`unicron simulate`, `unicron paper`, `unicron bench simulator`: what is asked for by name, printed, and refused."""

import json
import shlex
from pathlib import Path
from types import MappingProxyType

import pytest
import typer
from typer.testing import CliRunner

from unicron_lib.cli import bench, exit_code, simulator_figures
from unicron_lib.cli.paper import paper
from unicron_lib.cli.simulate import command_of, simulate
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation import cases, paper_facts, paper_runs, scenes, tables, workloads
from unicron_lib.simulation.ablations import without_detection
from unicron_lib.simulation.baselines import BASELINES, PAPER
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.generators import FIGURE_1
from unicron_lib.simulation.scenes import Asked, build, compared
from unicron_lib.simulation.traces import to_csv
from unicron_lib.simulation.unicron import Unicron

app = typer.Typer()
app.command()(simulate)
papers = typer.Typer()
papers.command()(paper)

FAULTS = (
    Fault(at_s=3_600.0, kind=ErrorKind.ECC_ERROR, node=1, repair_s=7_200.0),
    Fault(at_s=9_000.0, kind=ErrorKind.TASK_HANG, node=2, rank_share=0.5),
)
SCENARIO = """
cluster: {num_nodes: 4, gpus_per_node: 8, mtbf_gpu_s: 6.2e7}
jobs:
  - {job: a, weight: 2.0, min_gpus: 8, current_gpus: 8, throughput_flops: {4: 1.0e14, 8: 2.0e15, 16: 3.9e15}}
  - {job: b, max_gpus: 8, num_params: 7.0e+9, iteration_s: 5.0, arrives_s: 600, throughput_flops: {8: 1.9e15, 16: 3.0e15}}
"""


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(Trace(name="mine", source="a test", duration_s=20_000.0, faults=FAULTS)))
    return path


@pytest.fixture
def jobs_file(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(SCENARIO)
    return path


def answer(*options: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_json_has_each_policy_with_what_was_fitted_beside_what_was_published() -> None:
    found = answer("--trace", "trace-a", "--policy", "paper", "--seeds", "2")
    assert list(found["policies"]) == ["unicron", *PAPER]
    assert found["trace"] == "trace-a"
    assert found["seeds"] == [0, 1]
    assert set(cases.FITTED) == set(found["fitted"])
    own = found["policies"]["unicron"]["accumulated_waf"]
    for name, it in found["policies"].items():
        assert it["ratio_to_unicron"] == pytest.approx(it["accumulated_waf"] / own, rel=0.02)
        assert it["fitted"] == list(BASELINES[name].fitted if name in BASELINES else ())
        low, high = it["unicron_is_times_95"]
        assert low <= it["unicron_is_times"] <= high
    published = {name: it["published"] for name, it in found["policies"].items()}
    assert published == {"unicron": None, "megatron": 1.2, "bamboo": 4.6, "oobleck": 3.7, "varuna": 4.8}
    assert found["below"] == []


def test_all_is_every_baseline_and_unicron_comes_first() -> None:
    assert [policy.name for policy in build(Asked(trace="trace-b")).policies] == ["unicron", *BASELINES]


def test_the_printed_command_gives_the_same_result(trace_file: Path, jobs_file: Path) -> None:
    options = ["--trace", str(trace_file), "--jobs", str(jobs_file), "--policy", "gemini", "--policy", "equally", "--seed", "3"]
    found = answer(*options, "--nodes", "5", "--gpu-dollars-h", "3.5")
    command = shlex.split(str(found["command"]))
    assert command[:2] == ["unicron", "simulate"]
    assert answer(*command[2:]) == found


def test_what_is_usual_is_left_out_of_the_command() -> None:
    assert command_of(Asked(trace="trace-a")) == "unicron simulate --trace trace-a"
    assert command_of(Asked(trace="my traces/a.csv", num_seeds=3)) == "unicron simulate --trace 'my traces/a.csv' --seeds 3"


def test_another_seed_is_another_trace_and_the_same_seed_the_same() -> None:
    first, again, other = (answer("--trace", "trace-a", "--policy", "megatron", "--seed", str(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first["policies"]["unicron"] != other["policies"]["unicron"]


def test_people_see_what_is_no_evidence_and_how_to_do_it_again(trace_file: Path, jobs_file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    options = ["--trace", str(trace_file), "--jobs", str(jobs_file), "--policy", "paper", "--plot", str(plot)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0
    assert "* oobleck: fitted failure-free efficiency 0.27 of Megatron's." in result.output
    assert "What cost unicron most on the first seed: 00001/ecc_error/node-00001" in result.output
    assert "The same again: unicron simulate --trace" in result.output
    assert plot.read_text().startswith("<svg")


def test_a_run_below_another_policy_is_explained_to_people(
    monkeypatch: pytest.MonkeyPatch, trace_file: Path, jobs_file: Path
) -> None:
    two = (without_detection(), Unicron())
    monkeypatch.setattr(scenes, "_policies", lambda names, num_nodes: (two, "unicron-without-detection"))
    result = CliRunner().invoke(app, ["--trace", str(trace_file), "--jobs", str(jobs_file)])
    assert "unicron-without-detection is below another policy in 1 runs:" in result.output
    assert "seed 0: unicron has" in result.output
    assert "infrastructure_recovery_from_disruption" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--trace", "nothing.csv"], "there is no trace nothing.csv"),
        (["--trace", "trace-a", "--policy", "slurm"], "there is no policy slurm: give all, paper, ablations, unicron"),
        (["--trace", "trace-a", "--jobs", "case-6"], "there are no jobs case-6: give mixed, case-1"),
        (["--trace", "trace-a", "--jobs", "fleet-0"], "there are no jobs fleet-0"),
        (["--trace", "trace-a", "--jobs", "fleet-17"], "a fleet of 17 jobs needs as many nodes, the cluster has 16"),
        (["--trace", "trace-a", "--plot", "a.png"], "the picture is an SVG: call it a.svg"),
        (["--trace", "trace-a", "--policy", "gemini", "--plot", "/no/such/folder/a.svg"], "cannot be written: No such file"),
    ],
)
def test_a_mistake_is_one_sentence(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, UserError)
    assert exit_code(result.exception) == 2
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_node_with_a_mistyped_number_makes_no_huge_cluster(tmp_path: Path) -> None:
    path = tmp_path / "typo.csv"
    path.write_text("# duration_s: 10\nat_s,kind,node\n1,task_hang,1000000000\n")
    with pytest.raises(UserError, match="names node 1000000000, more than 100000 nodes: give --nodes"):
        build(Asked(trace=str(path)))
    assert build(Asked(trace=str(path), num_nodes=4)).traces[0].faults == ()


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_trace_that_is_saved_can_be_read_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"saved{suffix}"
    first = answer("--trace", "trace-b", "--policy", "gemini", "--seed", "5", "--save", str(path))
    again = answer("--trace", str(path), "--policy", "gemini", "--nodes", "16", "--mtbf-gpu-s", "6.2e7")
    for name, it in first["policies"].items():
        assert again["policies"][name]["accumulated_waf"] == pytest.approx(it["accumulated_waf"], rel=1e-9)


def test_a_file_has_no_seeds(trace_file: Path) -> None:
    with pytest.raises(UserError, match="is the same for each of 2 seeds: leave --seeds out"):
        build(Asked(trace=str(trace_file), num_seeds=2))


# by name


@pytest.mark.parametrize("other", [{"num_nodes": 24}, {"gpus_per_node": 4}, {"jobs": "case-1"}])
def test_what_is_published_is_told_of_the_papers_own_scene_only(other: dict[str, object], trace_file: Path) -> None:
    assert build(Asked(trace="trace-b")).published["varuna"] == 5.8
    assert build(Asked(trace="trace-b", **other)).published == {}
    assert build(Asked(trace=str(trace_file))).published == {}


def test_the_cluster_of_a_file_has_the_nodes_that_it_names(trace_file: Path) -> None:
    scene = build(Asked(trace=str(trace_file)))
    assert scene.cluster.num_nodes == 3
    assert scene.cluster.mtbf_gpu_s == 24 * 20_000.0  # one node was lost in that time
    assert scene.fitted == ()


def test_a_smaller_cluster_gets_the_faults_of_its_nodes(trace_file: Path) -> None:
    (made,) = build(Asked(trace=str(trace_file), num_nodes=2)).traces.values()
    assert made.faults == FAULTS[:1]


def test_a_large_cluster_is_a_fleet_unless_asked_for_ranks() -> None:
    large = Asked(trace="generated", num_nodes=400, days=1.0)
    scene = build(large)
    assert scene.reference == "unicron-fleet"
    assert scene.workload.name == "fleet-64"
    named = Asked(trace="generated", num_nodes=400, days=1.0, policies=("unicron", "megatron"))
    assert build(named).reference == "unicron"


@pytest.mark.parametrize(("num_nodes", "gpus_per_node"), [(23, 8), (64, 8), (130, 4), (12_500, 8)])
def test_the_jobs_of_a_fleet_have_whole_nodes_and_keep_it_busy(num_nodes: int, gpus_per_node: int) -> None:
    jobs = workloads.fleet(min(64, num_nodes // 4), num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    assert all(size % gpus_per_node == 0 for job in jobs for size in job.throughput_flops)
    assert sum(job.min_gpus for job in jobs) <= num_nodes * gpus_per_node <= sum(job.max_gpus for job in jobs)


def test_a_scenario_of_plan_is_a_workload(jobs_file: Path) -> None:
    first, second = workloads.named(str(jobs_file), num_nodes=4, gpus_per_node=8).jobs
    assert sorted(first.throughput_flops) == [8, 16]
    assert sorted(second.throughput_flops) == [8]
    assert (second.num_params, second.iteration_s, second.arrives_s) == (7e9, 5.0, 600.0)
    assert (first.weight, second.weight) == (2.0, 1.0)


def test_a_job_table_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = ("1,8,2023-01-01 00:00:00,3600", "2,16,2023-01-01 01:00:00,60", "3,512,2023-01-01 02:00:00,9")
    path.write_text("\n".join(["job_id,gpu_num,submit_time,duration", *rows]))
    jobs = workloads.named(str(path), num_nodes=4, gpus_per_node=8).jobs
    assert [(job.job, job.arrives_s) for job in jobs] == [("job-1", 0.0), ("job-2", 3600.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must be a mapping with the key jobs"),
        ("jobs: []", "jobs: "),
        ("jobs: [{job: a}]", r"jobs\.0\.throughput_flops: field required"),
        ("jobs: [{job: a, throughput_flops: {8: -1}}]", "greater than 0"),
        ("jobs: [{job: a, min_gpus: 16, throughput_flops: {8: 1}}]", "job a lists no throughput for a size from min_gpus"),
        ("jobs: [{job: a, throughput_flops: {8: 1}}, {job: a, throughput_flops: {8: 1}}]", "has two jobs a"),
        ("jobs: [", "neither YAML nor JSON"),
    ],
)
def test_a_bad_file_of_jobs_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as raised:
        workloads.named(str(path), num_nodes=4, gpus_per_node=8)
    assert "\n" not in str(raised.value)


# the papers


def by_first(table: tables.Table) -> dict[object, tuple[object, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def test_a_restart_by_hand_is_played_in_68_minutes() -> None:
    rows = by_first(paper_runs.restart_path())
    assert rows["in all"] == (68, pytest.approx(68.0))
    assert all(published == pytest.approx(simulated) for published, simulated in rows.values())


def test_the_generated_mix_is_that_of_figure_1() -> None:
    rows = by_first(paper_facts.figure_1())
    assert set(rows) == {str(kind) for kind in FIGURE_1}
    for _, _, published, generated in rows.values():
        assert generated == pytest.approx(published, abs=0.6)


def test_the_time_between_failures_is_that_of_rsc() -> None:
    for published, computed, *_ in by_first(paper_facts.rsc()).values():
        assert published is None or computed == pytest.approx(published, rel=0.005)


def test_oobleck_s_averages_are_those_of_its_artifact() -> None:
    rows = paper_facts.oobleck().rows
    assert len(rows) == 5
    assert all(published == pytest.approx(computed, rel=0.03) for _, _, published, computed, _ in rows)


def test_every_method_of_detection_is_in_the_table() -> None:
    table = paper_facts.detection()
    assert all(with_it < without for _, _, _, with_it, _, without in table.rows)
    named = {kind for row in table.rows for kind in str(row[1]).split(", ")}
    assert {str(kind) for kind in FIGURE_1} <= named


def test_unicron_goes_on_sooner_than_any_other_at_each_size() -> None:
    for _, _, own, with_own_bandwidths, *others in paper_runs.transition_times().rows:
        assert all(own < with_own_bandwidths < other for other in others)


def test_unicron_is_not_below_a_simple_rule_in_any_case() -> None:
    calls: list[int] = []
    table = paper_runs.multi_job(1, lambda: calls.append(1))
    assert len(calls) == paper_runs.multi_job_runs(1)
    assert len(table.rows) == 2 * len(cases.CASES)
    assert all(times >= 1.0 for _, _, *ratios in table.rows for times in ratios)
    assert table.notes[-1] == "Unicron is above every rule, or equal to it, in each run."


@pytest.mark.parametrize(("trace", "low", "high"), [("trace-a", 1.1, 1.3), ("trace-b", 1.7, 2.1)])
def test_the_ratio_to_megatron_is_near_the_published_one(trace: str, low: float, high: float) -> None:
    """Under the stated reading, which is fitted: jobs wait for their node, repairs of days and of about a day."""
    found = compared(build(Asked(trace=trace, policies=("paper",), num_seeds=8)), lambda: None)
    times = found.times("megatron")
    assert times is not None
    assert low <= times.mean <= high
    assert found.below() == ()


def test_a_page_is_written_with_all_tables_and_pictures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace_file: Path
) -> None:
    monkeypatch.setattr(cases, "CASES", (1,))
    kept = {"unicron-without-detection": scenes.ABLATIONS["unicron-without-detection"]}
    monkeypatch.setattr(scenes, "ABLATIONS", MappingProxyType(kept))
    monkeypatch.setattr(paper_runs, "FLEET_GPUS", (1_024,))
    monkeypatch.setattr(paper_runs, "FLEET_DAYS", 2.0)
    folder = tmp_path / "deep" / "results"
    result = CliRunner().invoke(papers, [str(folder), "--seeds", "2", "--trace", str(trace_file)])
    assert result.exit_code == 0, result.output
    page = (folder / "README.md").read_text()
    written = {path.stem for path in folder.glob("*.json")}
    assert {"figure-1", "restart-path", "detection", "trace-a", "trace-b", "own-1", "multi-job", "transition-times"} <= written
    assert {"ablations", "rsc", "oobleck-artifact", "acme", "sizes"} <= written
    assert {path.stem for path in folder.glob("*.svg")} == {"trace-a", "trace-b", "own-1"}
    assert page.count("\n## ") == len(written)
    assert "](own-1.svg)" in page
    for path in folder.glob("*.json"):
        table = json.loads(path.read_text())
        assert f"## {table['title']}" in page
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(papers, [str(tmp_path / "file" / "results"), "--seeds", "2"])
    assert isinstance(result.exception, UserError)
    assert "cannot be made" in str(result.exception)


# the bench


def test_the_bench_measures_both_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = list(simulator_figures.measure(num_nodes=256, days=5.0))
    assert [figure.bar_s for figure in figures] == [0.3, 1.0, 60.0]
    assert all(figure.cpu_s > 0 and figure.memory_mb > 0 and figure.num_faults for figure in figures)
    assert figures[1].virtual_s == 5 * figures[0].virtual_s
    monkeypatch.setattr(simulator_figures, "measure", lambda days: figures)
    result = CliRunner().invoke(bench.group, ["simulator", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    assert len(found["figures"]) == 3


def test_a_bar_is_of_time_and_of_memory() -> None:
    fine = simulator_figures.Simulated(
        what="it", cpu_s=1.0, wall_s=9.0, bar_s=1.0, virtual_s=50.0, num_faults=1, memory_mb=1000.0
    )
    late = simulator_figures.Simulated(what="it", cpu_s=1.1, wall_s=1.1, bar_s=1.0, virtual_s=1.0, num_faults=1, memory_mb=1.0)
    large = simulator_figures.Simulated(
        what="it", cpu_s=0.1, wall_s=0.1, bar_s=1.0, virtual_s=1.0, num_faults=1, memory_mb=1001.0
    )
    assert [it.ok for it in (fine, late, large)] == [True, False, False]
    assert fine.times_real == 50.0
