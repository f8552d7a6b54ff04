"""`unicron bench`: its figures on a small scale, and what it prints."""

import json
import statistics
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from unicron_lib.cli import bench, planner_figures
from unicron_lib.cli.detection_figures import TRIALS, Latency, percentile
from unicron_lib.cli.overhead_figures import Overhead, Spread, Verdict, evaluate, spread
from unicron_lib.cli.planner_figures import Figure
from unicron_lib.detection import trial
from unicron_lib.errors import UserError
from unicron_lib.local import recovery_run
from unicron_lib.local.bench_rank import RAISED, raised_at
from unicron_lib.local.census import Census, quietest
from unicron_lib.local.iterations import IterationWatch, Sight
from unicron_lib.local.outages import Fault, Outage, felt_at, outage, stall
from unicron_lib.local.overhead_rank import ITERATIONS, Block
from unicron_lib.local.strikes import BenchStopped, NotInstalled
from unicron_lib.training.ledger import Entry, Ledger

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


# --- detection -------------------------------------------------------------------------------------------------------

SOON = Latency(what="a fault", samples=(0.004, 0.005, 0.09), bar=0.1, paper=1.8)
FLAWLESS = trial.Verdict(
    hours=24.0,
    iterations=1000,
    mean_s=1.1,
    false_alarms=0,
    hangs=3,
    hangs_found=3,
    stragglers=2,
    stragglers_found=2,
    latest_hang=3.3,
    latest_straggler=40,
)


def detect(monkeypatch: pytest.MonkeyPatch, latency: Latency, verdict: trial.Verdict, *options: str) -> typer.testing.Result:
    async def stand_in(rounds: int, done: Callable[[], None]) -> list[Latency]:
        done()
        return [latency]

    monkeypatch.setattr(bench, "_latencies", stand_in)
    monkeypatch.setattr(bench, "_verdicts", lambda _done: {"quiet": verdict})
    return CliRunner().invoke(bench.group, ["detection", *options])


def test_detection_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = detect(monkeypatch, SOON, FLAWLESS, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    (figure,) = found["figures"]
    assert (figure["median"], figure["p95"], figure["bar"], figure["paper"]) == (0.005, 0.09, 0.1, 1.8)
    assert found["trials"]["quiet"]["precision"] == found["trials"]["quiet"]["recall"] == 1.0


@pytest.mark.parametrize(
    ("latency", "verdict"),
    [
        (replace(SOON, samples=(0.004, 0.11)), FLAWLESS),
        (SOON, replace(FLAWLESS, false_alarms=1)),
        (SOON, replace(FLAWLESS, hangs_found=2)),
        (SOON, replace(FLAWLESS, latest_hang=3.5)),
    ],
)
def test_a_late_observation_a_false_alarm_or_a_missed_hang_fails(
    monkeypatch: pytest.MonkeyPatch, latency: Latency, verdict: trial.Verdict
) -> None:
    result = detect(monkeypatch, latency, verdict)
    assert result.exit_code == 1
    assert "MISSED" in result.stdout


def test_hangs_of_ranks_that_spin_are_told_apart_and_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    spinning = replace(FLAWLESS, spinning=2, spinning_found=2, latest_spinning=4.2)
    assert spinning.hang_bar == pytest.approx(3.0 + 0.5 / 1.1)
    result = detect(monkeypatch, SOON, spinning)
    assert result.exit_code == 0
    assert "2 of 2" in result.stdout
    (told,) = json.loads(detect(monkeypatch, SOON, spinning, "--json").stdout)["trials"].values()
    assert (told["promptness"], told["latest_spinning"], told["ok"]) == ("ok", 4.2, True)


def test_what_has_no_bar_cannot_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = detect(monkeypatch, replace(SOON, samples=(48.0,), bar=None, paper=None, unit="iterations"), FLAWLESS)
    assert result.exit_code == 0
    assert "48 iterations" in result.stdout
    assert "recalled, not" in result.stdout


@given(samples=st.lists(st.floats(0, 1e6), min_size=1), share=st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_that_enough_do_not_exceed(samples: list[float], share: float) -> None:
    found = percentile(samples, share)
    within = [sample for sample in samples if sample <= found]
    assert len(within) >= share * len(samples)
    assert len([sample for sample in samples if sample < found]) < share * len(samples)


def test_a_simulated_day_can_be_run() -> None:
    """The shortest of them; the others are run by the bench."""
    shortest = max(TRIALS.values(), key=lambda scenario: scenario.iteration_s)
    verdict = trial.try_detection(replace(shortest, hours=1.0))
    assert verdict.false_alarms == 0


def test_when_an_exception_was_raised_is_in_its_message() -> None:
    assert raised_at(f"{RAISED}{12.345678901!r}") == 12.345678901


# --- overhead --------------------------------------------------------------------------------------------------------


def blocks(*, plain_s: float, monitored_s: float, telling_s: float = 0.0001) -> list[Block]:
    return [
        Block(monitored=True, wall_s=monitored_s, thread_s=monitored_s, agent_s=0.01, telling_s=telling_s),
        Block(monitored=False, wall_s=plain_s, thread_s=plain_s),
    ]


def test_pairs_of_blocks_are_compared_whichever_comes_first() -> None:
    pair = blocks(plain_s=1.0, monitored_s=1.002)
    found = evaluate([*pair, *reversed(pair), *pair])
    assert found.num_pairs == 3
    assert found.wall.median == found.thread.median == pytest.approx(0.002)
    assert found.telling.median == pytest.approx(0.0001)
    assert found.iteration_s == pytest.approx(1.0 / ITERATIONS)
    assert found.ok


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=300))
def test_the_median_is_within_its_interval(differences: list[float]) -> None:
    found = spread(differences)
    assert min(differences) <= found.low <= found.median <= found.high <= max(differences)
    assert found.median == statistics.median(differences)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((-0.01, 0.004), Verdict.OK), ((-0.01, 0.02), Verdict.UNCLEAR), ((0.006, 0.02), Verdict.MISSED)],
)
def test_an_interval_that_holds_the_bar_settles_nothing(interval: tuple[float, float], verdict: Verdict) -> None:
    low, high = interval
    assert Spread(median=low, low=low, high=high).against(0.005) is verdict


CHEAP = Overhead(
    iteration_s=0.05,
    busy_s=0.05,
    telling=Spread(median=0.001, low=0.0009, high=0.0012),
    wall=Spread(median=0.001, low=-0.02, high=0.02),
    thread=Spread(median=0.001, low=-0.001, high=0.002),
    agent_cores=0.01,
    num_pairs=20,
)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"telling": Spread(median=0.006, low=0.0055, high=0.007)}, 1),
        ({"wall": Spread(median=0.01, low=0.006, high=0.02)}, 1),
        ({"wall": Spread(median=0.001, low=-0.001, high=0.002)}, 0),
        ({"telling": Spread(median=0.004, low=0.003, high=0.006)}, 1),
    ],
    ids=["cheap", "dear", "slower on the clock", "shown by all", "not shown"],
)
def test_overhead_is_told_and_held_against_the_bar(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Spread], code: int
) -> None:
    found = replace(CHEAP, **change)

    async def stand_in(pairs: int) -> Overhead:
        return found

    monkeypatch.setattr(bench, "_overhead", stand_in)
    as_json = CliRunner().invoke(bench.group, ["overhead", "--json"])
    assert as_json.exit_code == code
    told = json.loads(as_json.stdout)
    assert told["ok"] is (code == 0)
    table = CliRunner().invoke(bench.group, ["overhead"]).stdout
    assert found.summary in " ".join(table.split())
    assert told["verdict"] == found.verdict
    assert ("missed" in table) == (found.verdict is Verdict.MISSED)
    assert ("unclear" in table) == ("wall" not in change)


# --- recovery --------------------------------------------------------------------------------------------------------

QUICK = Outage(stalled_s=0.5, regained_s=0.5, lost_micro_batches=0, detection_s=0.1)
SLOW = Outage(stalled_s=12.0, regained_s=14.0, again=5, lost_micro_batches=72)
KEPT = [("unicron", Fault.SEV2, QUICK), ("torchrun", Fault.SEV2, SLOW), ("unicron", Fault.GROWTH, replace(QUICK, copy_s=0.2))]


def recover(monkeypatch: pytest.MonkeyPatch, measured: list[tuple[str, Fault, Outage]], *options: str):
    monkeypatch.setattr(bench, "_outages", lambda faults, systems, repeat: (measured, ["torchft is not installed"]))
    return CliRunner().invoke(bench.group, ["recovery", *options])


def test_recovery_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = recover(monkeypatch, KEPT, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["notes"] == ["torchft is not installed"]
    assert {(it["system"], it["fault"]) for it in found["recoveries"]} == {(name, fault.value) for name, fault, _ in KEPT}
    assert [bar["found"] for bar in found["bars"]] == [0.5, 0, 24.0, pytest.approx(0.3)]


@pytest.mark.parametrize(
    "found",
    [
        ("unicron", Fault.SEV2, replace(QUICK, stalled_s=1.3)),
        ("unicron", Fault.SEV2, replace(QUICK, lost_micro_batches=1)),
        ("unicron", Fault.SEV2, replace(QUICK, lost_micro_batches=None)),
        ("unicron", Fault.SEV1, replace(QUICK, stalled_s=3.05)),
        ("unicron", Fault.SEV1, replace(QUICK, detection_s=None)),
        ("unicron", Fault.GROWTH, replace(QUICK, stalled_s=1.5, copy_s=0.4)),
    ],
)
def test_a_slow_recovery_and_lost_work_miss_their_bars(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, Fault, Outage]
) -> None:
    result = recover(monkeypatch, [found])
    assert result.exit_code == 1
    assert "MISSED" in result.stdout


def test_ten_times_as_fast_as_torchrun_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recover(monkeypatch, [KEPT[0], ("torchrun", Fault.SEV2, replace(SLOW, stalled_s=5.1))]).exit_code == 0
    assert recover(monkeypatch, [KEPT[0], ("torchrun", Fault.SEV2, replace(SLOW, stalled_s=4.9))]).exit_code == 1


def test_people_get_medians_spreads_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("torchrun", Fault.SEV2, replace(SLOW, stalled_s=20.0))
    told = " ".join(recover(monkeypatch, [*KEPT, more]).stdout.split())
    assert "16.00 (12.00-20.00)" in told
    assert "32.0 x" in told
    assert "72 (72-72)" in told


def sights(*rows: tuple[float, int, int], ranks: int = 2) -> list[Sight]:
    """Each row is when an iteration of a generation was done by the last of the ranks."""
    return [
        Sight(at=at - 0.01 * (ranks - 1 - rank), generation=generation, rank=rank, iteration=iteration)
        for at, generation, iteration in rows
        for rank in range(ranks)
    ]


def test_an_outage_lasts_until_all_ranks_have_done_an_iteration() -> None:
    found = outage(sights((1.0, 1, 0), (2.0, 1, 1), (5.0, 2, 2), (6.0, 2, 3)), 2.5)
    assert (found.stalled_s, found.regained_s, found.again) == (2.5, 2.5, 0)


def test_who_goes_back_to_a_checkpoint_does_iterations_again() -> None:
    found = outage(sights((1.0, 1, 0), (2.0, 1, 1), (3.0, 1, 2), (5.0, 2, 1), (6.0, 2, 2), (7.0, 2, 3)), 3.5)
    assert (found.stalled_s, found.regained_s, found.again) == (1.5, 3.5, 2)


def test_iterations_of_the_old_generation_are_no_recovery() -> None:
    seen = sights((1.0, 1, 0), (2.0, 1, 1), (3.0, 1, 2), (5.0, 2, 3))
    assert outage(seen, 1.995).stalled_s == pytest.approx(3.005)
    assert felt_at(seen, 1.995) == 3.0
    assert felt_at(seen, 3.5) == 3.5


def test_an_iteration_that_not_all_ranks_have_done_is_not_complete() -> None:
    seen = [*sights((1.0, 1, 0)), Sight(at=2.0, generation=2, rank=0, iteration=1), *sights((5.0, 3, 1))]
    assert outage(seen, 1.5, ranks=2).stalled_s == 3.5


def test_survivors_may_go_on_in_the_same_generation() -> None:
    seen = sights((1.0, 1, 0), (2.0, 1, 1), (5.0, 1, 2))
    assert outage(seen, 2.5, renews=False).stalled_s == 2.5


def test_without_a_new_iteration_there_is_no_outage_to_tell() -> None:
    with pytest.raises(ValueError, match="no iteration"):
        outage(sights((1.0, 1, 0), (2.0, 1, 1), (5.0, 2, 1)), 2.5)
    with pytest.raises(ValueError, match="no iteration"):
        outage(sights((1.0, 1, 0)), 2.5)


@given(st.integers(1, 8), st.integers(0, 9), st.floats(0.1, 100.0))
def test_what_was_done_again_is_what_lies_between_the_checkpoint_and_the_fault(ranks: int, back: int, down_s: float) -> None:
    before = [(float(i), 1, i) for i in range(10)]
    resumed = 9.5 + down_s
    after = [(resumed + i, 2, 10 - back + i) for i in range(back + 1)]
    found = outage(sights(*before, *after, ranks=ranks), 9.5)
    assert found.again == back
    assert found.stalled_s == pytest.approx(down_s)
    assert found.regained_s == pytest.approx(down_s + back)


def test_a_stall_is_the_longest_iteration_beyond_the_usual_one() -> None:
    rows = [(float(i), 1, i) for i in range(5)] + [(6.5, 2, 5), (7.5, 2, 6)]
    assert stall(sights(*rows), 4.2, 7.6) == pytest.approx(1.5)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UserError, match="--faults sev4: choose of sev3, sev2, sev1"):
        recovery_run.run(["sev4"], ["unicron"], 1, print)
    with pytest.raises(UserError, match="--systems horovod: choose of unicron, torchrun, torchft"):
        recovery_run.run(["sev2"], ["horovod"], 1, print)


async def _too_slow(trials: recovery_run.Trials) -> AsyncGenerator[recovery_run.Found, None]:
    (trials.home / "torchrun").mkdir()
    yield Fault.SEV2, SLOW
    raise BenchStopped("waited in vain")


async def _missing(trials: recovery_run.Trials) -> AsyncGenerator[recovery_run.Found, None]:
    raise NotInstalled("torchft is not installed")
    yield Fault.SEV2, SLOW


async def _quick(trials: recovery_run.Trials) -> AsyncGenerator[recovery_run.Found, None]:
    yield Fault.SEV2, QUICK


def test_a_system_that_fails_or_is_missing_is_told_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recovery_run, "SYSTEMS", {"torchrun": _too_slow, "torchft": _missing, "unicron": _quick})
    measured, notes = recovery_run.run(["sev2"], ["torchrun", "torchft", "unicron"], 1, lambda _: None)
    assert measured == [("torchrun", Fault.SEV2, SLOW), ("unicron", Fault.SEV2, QUICK)]
    (home,) = tmp_path.iterdir()
    assert notes == [f"torchrun: waited in vain: see {home}", "torchft is not installed"]


def test_where_all_went_well_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recovery_run, "SYSTEMS", {"torchft": _missing, "unicron": _quick})
    recovery_run.run(["sev2"], ["torchft", "unicron"], 1, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_without_our_own_figures_there_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recovery_run, "SYSTEMS", {"unicron": _too_slow})
    with pytest.raises(BenchStopped):
        recovery_run.run(["sev2"], ["unicron"], 1, lambda _: None)


def test_iterations_are_seen_as_ranks_append_them(tmp_path: Path) -> None:
    with IterationWatch(tmp_path / "ledger") as watch, Ledger(tmp_path / "ledger", generation=3, rank=1) as ledger:
        for iteration in range(3):
            ledger.write(Entry(iteration=iteration, samples=[1, 2], loss=1.0))
        assert watch.until(lambda found: len(found) == 3, timeout_s=30)
    assert [(it.generation, it.rank, it.iteration) for it in watch.sights] == [(3, 1, 0), (3, 1, 1), (3, 1, 2)]


def test_a_line_that_is_not_complete_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "g1-r0.jsonl"
    path.write_text('{"skipped":[]}\n{"iteration":0,"samples":[],"loss":1.0}\n{"itera')
    with IterationWatch(tmp_path) as watch:
        assert watch.until(lambda found: len(found) == 1, timeout_s=30)
        with path.open("a") as ledger:
            ledger.write('tion":1,"samples":[],"loss":1.0}\n')
        assert watch.until(lambda found: len(found) == 2, timeout_s=30)
    assert [it.iteration for it in watch.sights] == [0, 1]


COUNTED = Census(processes=7, threads=40, descriptors=200, sockets=30, listening=4, shared=2)


def test_only_what_has_grown_is_a_leak() -> None:
    assert replace(COUNTED, threads=39).grown_since(COUNTED) == {}
    assert replace(COUNTED, sockets=31, threads=39).grown_since(COUNTED) == {"sockets": (30, 31)}


def test_what_is_held_for_a_moment_is_no_leak() -> None:
    assert quietest([replace(COUNTED, sockets=35), COUNTED, replace(COUNTED, threads=41)]) == COUNTED
