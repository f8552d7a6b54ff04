"""`unicron characterize`: the figures of a job table, whatever scheduler wrote it."""

import io
import json
import math
import random
import statistics
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from unicron_lib.cli.characterize import characterize as command
from unicron_lib.diagnosis import job_cells, job_rows, job_table
from unicron_lib.diagnosis.characterize import POINTS_S, Characterization, as_json, characterize, state_of
from unicron_lib.diagnosis.job_failures import category_of
from unicron_lib.diagnosis.job_pictures import pictures
from unicron_lib.errors import UserError

BEGIN = datetime(2023, 5, 17, 11, tzinfo=UTC)
ACME = ("job_id", "user", "node_num", "gpu_num", "cpu_num", "type", "state", "submit_time", "start_time", "end_time")


@dataclass(frozen=True)
class Job:
    """A job as a test tells it; times in seconds after `BEGIN`."""

    gpus: int = 8
    type: str = "Pretrain"
    state: str = "COMPLETED"
    submitted: int = 0
    queued: int = 5
    ran: int = 100
    user: str = "u1"


JOBS = st.builds(
    Job,
    gpus=st.sampled_from([0, 1, 4, 8, 512, 1000]),
    type=st.sampled_from(["Pretrain", "Eval", "SFT", ""]),
    state=st.sampled_from(["COMPLETED", "FAILED", "CANCELLED by 17", "NODE_FAIL", "RUNNING", "odd"]),
    submitted=st.integers(0, 10**6),
    queued=st.integers(0, 10**5),
    ran=st.integers(0, 10**6),
)


def acme(jobs: list[Job], *, told: bool = True) -> str:
    """The jobs as a table with Acme's columns; without durations and queues unless `told`."""
    lines = [",".join((*ACME, "duration", "queue") if told else ACME)]
    for number, job in enumerate(jobs):
        moments = (job.submitted, job.submitted + job.queued, job.submitted + job.queued + job.ran)
        times = (str(BEGIN + timedelta(seconds=it)) for it in moments)
        cells = (f"j{number}", job.user, "1", job.gpus, "16", job.type, job.state, *times)
        lines.append(",".join(map(str, (*cells, job.ran, float(job.queued)) if told else cells)))
    return "\n".join(lines) + "\n"


def read(text: str, failures: Path | None = None) -> Characterization:
    """The figures of a table that is only in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape"))))
        notes = job_table.read_notes(failures) if failures else None
        return characterize(job_table.read(job_rows.STANDARD_INPUT, notes))


@given(jobs=st.lists(JOBS, min_size=1, max_size=40).filter(lambda jobs: any(job.gpus for job in jobs)), told=st.booleans())
def test_the_figures_are_those_of_plain_sums(jobs: list[Job], *, told: bool) -> None:
    found = read(acme(jobs, told=told))
    gpu_jobs = [job for job in jobs if job.gpus]
    assert (found.num_jobs, found.num_gpu_jobs, found.num_cpu_jobs) == (len(jobs), len(gpu_jobs), len(jobs) - len(gpu_jobs))
    total = sum(job.gpus * job.ran for job in gpu_jobs)
    assert found.gpu_time_s == pytest.approx(total)
    for shares, key in ((found.types, lambda job: job.type or "untold"), (found.states, lambda job: state_of(job.state))):
        assert {it.name: it.num_jobs for it in shares} == {
            name: [key(job) for job in gpu_jobs].count(name) for name in map(key, gpu_jobs)
        }
        assert sum(it.jobs_share for it in shares) == pytest.approx(1)
        assert sum(it.gpu_time_share for it in shares) == pytest.approx(1 if total else 0)
        for it in shares:
            assert it.gpu_time_s == pytest.approx(sum(job.gpus * job.ran for job in gpu_jobs if key(job) == it.name))
    ran = sorted(job.ran for job in gpu_jobs)
    assert found.durations[0].name == "all"
    assert found.durations[0].median_s == pytest.approx(statistics.median(ran))
    shares = [sum(seconds <= point for seconds in ran) / len(ran) for point in POINTS_S]
    assert found.durations[0].shares == pytest.approx(shares)
    assert found.queues[0].mean_s == pytest.approx(statistics.fmean(job.queued for job in gpu_jobs))
    failed = [job for job in gpu_jobs if job.state in {"FAILED", "NODE_FAIL"}]
    assert found.failures.num == len(failed) == sum(it.num for it in found.failures.reasons)
    json.dumps(as_json(found), allow_nan=False)


@given(jobs=st.lists(JOBS, min_size=1, max_size=30).filter(lambda jobs: any(job.gpus for job in jobs)))
def test_boxes_and_sizes_are_in_order(jobs: list[Job]) -> None:
    found = read(acme(jobs))
    for box in found.demand:
        asked = [job.gpus for job in jobs if job.gpus and box.name in {"all", job.type or "untold"}]
        assert box.whisker_low <= box.q1 <= box.median <= box.q3 <= box.whisker_high
        assert min(asked) <= box.whisker_low
        assert box.whisker_high <= max(asked)
        assert box.num_jobs == len(asked)
    for shares in (found.sizes.jobs_shares, found.sizes.gpu_time_shares):
        assert list(shares) == sorted(shares)
    assert found.sizes.jobs_shares[-1] == 1
    for text in pictures(found).values():
        ET.fromstring(text)


@given(jobs=st.lists(JOBS, min_size=2, max_size=30).filter(lambda jobs: any(job.gpus for job in jobs)), seed=st.integers(0, 99))
def test_neither_the_order_of_rows_nor_the_size_of_a_batch_matters(jobs: list[Job], seed: int) -> None:
    once = as_json(read(acme(jobs)))
    random.Random(seed).shuffle(jobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_rows, "BATCH", 3)
        again = as_json(read(acme(jobs)))
    assert json.dumps(rounded(again)) == json.dumps(rounded(once))


def rounded(value: Any) -> Any:
    """Sums of floats in another order differ in the last digits."""
    if isinstance(value, dict):
        return {key: rounded(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(it) for it in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_box_of_the_papers_pretraining_jobs_comes_out() -> None:
    """Kalos, figure 5: whiskers 96 and 512, quartiles 256, 512, 512. A job of 1 GPU below the box's reach is no whisker."""
    (box,) = read(acme([Job(gpus=gpus) for gpus in (96, 256, 512, 512, 512)])).demand
    assert (box.whisker_low, box.q1, box.median, box.q3, box.whisker_high) == (96, 256, 512, 512, 512)
    (box,) = read(acme([Job(gpus=gpus) for gpus in (1, 500, 510, 512, 512, 520, 530)])).demand
    assert box.whisker_low == 500


SACCT = """\
JobID|JobName|User|Partition|AllocTRES|ReqTRES|State|Submit|Start|End|Elapsed|Reason
7|pre"train|ann|gpu|billing=96,cpu=96,gres/gpu:a100=8,gres/gpu=8,mem=1T,node=1||NODE_FAIL|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-02T02:01:00|1-02:00:00|None
7.batch|batch|||cpu=96,gres/gpu=8||FAILED|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-02T02:01:00|1-02:00:00|
7.extern|extern|||cpu=96,gres/gpu=8||FAILED|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-02T02:01:00|1-02:00:00|
8|pre"train|ann|gpu|cpu=96,gres/gpu:a100=8,gres/gpu:h100=4||COMPLETED|2024-01-02T02:02:00|2024-01-02T02:03:00|2024-01-02T02:03:30|00:30|None
9|cpu only|bob|cpu|cpu=4,mem=1G,node=1|cpu=4|COMPLETED|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T00:00:09|00:00:09|None
10|never|bob|gpu||cpu=4,gres/gpu=2|CANCELLED by 1000|2024-01-01T00:00:00|None|2024-01-01T00:05:00|00:00:00|Priority
11|odd|bob|gpu|a|b|c
"""


def test_what_sacct_prints_is_read() -> None:
    found = read(SACCT)
    assert (found.num_jobs, found.num_gpu_jobs, found.num_cpu_jobs) == (4, 3, 1)
    assert found.gpu_time_s == 8 * 26 * 3600 + 12 * 30
    assert found.left_out == {"rows with more or fewer cells than the header": 1, "steps of jobs": 2}
    assert not found.unreadable
    assert {it.name: it.num_jobs for it in found.states} == {"failed": 1, "completed": 1, "cancelled": 1}
    assert found.columns["type"] == "Partition"
    assert found.queues[0].num_jobs == 2
    (cause,) = found.failures.reasons
    assert (cause.name, cause.category, cause.to_failure_median_s) == ("NODE_FAIL", "infrastructure", 26 * 3600)
    assert (cause.num_restarted, cause.to_restart_median_s) == (1, 120)


def test_what_kubernetes_exports_is_read() -> None:
    header = "name\tnamespace\tnvidia.com/gpu\tphase\tcreationTimestamp\tstartTime\tcompletionTime\tduration\n"
    rows = "a.b.1\tllm\t8\tSucceeded\t2024-01-01T00:00:00Z\t2024-01-01T00:00:10Z\t2024-01-01T01:00:10Z\t1h\n"
    rows += "c\teval\t1\tFailed\t2024-01-01T00:00:00Z\t2024-01-01T00:00:10Z\t2024-01-01T00:02:15Z\t2m5s\n"
    found = read(header + rows)
    assert {it.name: it.gpu_time_s for it in found.types} == {"llm": 8 * 3600, "eval": 125}
    assert {it.name for it in found.states} == {"completed", "failed"}
    assert found.queues[0].mean_s == 10


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("117", 117),
        ("1.5", 1.5),
        ("01:02", 62),
        ("02:00:01", 7201),
        ("3-00:00:00", 259200),
        ("00:01.500", 1.5),
        ("1d2h", 93600),
    ],
)
def test_lengths_of_time(cell: str, expected: float) -> None:
    assert job_cells.seconds(cell) == expected


@given(cell=st.text(min_size=1, max_size=30) | st.from_regex(r"[0-9:dhms.\-]{1,20}", fullmatch=True))
@pytest.mark.parametrize("parse", [job_cells.seconds, job_cells.gpus, job_cells.moment], ids=lambda parse: parse.__name__)
def test_a_cell_is_a_finite_number_or_counted_as_unreadable(parse: Any, cell: str) -> None:
    (value,), num_unreadable = job_cells.numbers([cell], parse)
    assert math.isnan(value) or abs(value) < 1e30
    assert num_unreadable == (math.isnan(value) and cell.strip().lower() not in job_cells.BLANK)


def test_unreadable_cells_are_counted_and_their_jobs_kept() -> None:
    found = read("gpus,duration,queue,type\n8,10,long,a\n8,many,7,a\n-1,3,3,b\n,3,3,b\n1e400,1,1,b\n")
    assert found.unreadable == {"gpus": 2, "duration_s": 1, "queue_s": 1}
    assert found.left_out == {"without a number of GPUs": 3}
    assert found.num_gpu_jobs == 2
    assert [it.num_jobs for it in found.durations] == [1]
    assert [it.name for it in found.states] == ["unknown"]


def test_many_types_are_folded_into_one_row() -> None:
    found = read(acme([Job(type=f"t{number}", ran=100 - number) for number in range(50)]))
    assert [it.name for it in found.types] == [f"t{number}" for number in range(12)] + ["(38 others)"]
    assert sum(it.num_jobs for it in found.types) == 50


def test_causes_come_from_a_second_table(tmp_path: Path) -> None:
    """Time to failure runs to the moment told there, time to restart from there to the restart told there."""
    failures = tmp_path / "failures.csv"
    failed_at, again = BEGIN + timedelta(seconds=65), BEGIN + timedelta(seconds=365)
    rows = [("j0", "NVLink Error", failed_at, again), ("j1", "Key Error", "", ""), ("j9", "stranger", "", "")]
    failures.write_text("job_id,reason,fail_time,restart_time\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    jobs = [Job(state="CANCELLED", gpus=64), Job(state="FAILED", ran=10), Job(state="FAILED", ran=0), Job()]
    found = read(acme(jobs), failures=failures)
    causes = {it.name: it for it in found.failures.reasons}
    assert list(causes) == ["NVLink Error", "Key Error", "unexplained"]
    nvlink = causes["NVLink Error"]
    assert (nvlink.category, nvlink.to_failure_mean_s, nvlink.to_restart_mean_s) == ("infrastructure", 60, 300)
    assert causes["Key Error"].category == "script"
    assert causes["Key Error"].to_restart_mean_s is None
    assert nvlink.gpu_time_share == pytest.approx(6400 / 6480)
    assert {it.name: it.num for it in found.failures.categories} == {"infrastructure": 1, "script": 1, "unknown": 1}


RUNS = st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(1, 20), st.booleans())


@given(runs=st.lists(RUNS, min_size=1, max_size=25))
def test_a_restart_is_the_next_run_of_the_same_user_and_name(runs: list[tuple[str, int, int, bool]]) -> None:
    rows = [f"u,{name},1,{start},{start + ran},{'FAILED' if bad else 'COMPLETED'}" for name, start, ran, bad in runs]
    found = read("\n".join(["user,job_name,gpus,start,end,state", *rows, ""]))
    gaps = []
    for name, start, ran, bad in runs:
        later = [other for of, other, _, _ in runs if of == name and other >= start + ran]
        gaps += [min(later) - start - ran] if bad and later else []
    assert sum(it.num_restarted for it in found.failures.reasons) == len(gaps)
    if gaps:
        assert found.failures.reasons[0].to_restart_mean_s == pytest.approx(statistics.fmean(gaps))


def test_a_job_that_fails_as_it_starts_is_not_its_own_restart() -> None:
    rows = "user,job_name,gpus,start,end,state\nu,a,1,5,5,FAILED\nu,a,1,7,9,COMPLETED\nu,b,1,5,5,FAILED\n"
    (cause,) = read(rows).failures.reasons
    assert (cause.num, cause.num_restarted, cause.to_restart_mean_s) == (2, 1, 2)


def test_tasks_of_a_job_array_and_nameless_jobs_are_not_each_others_restarts() -> None:
    array = "job_id,user,job_name,gpus,start,end,state\n5_1,u,sweep,1,0,5,FAILED\n5_2,u,sweep,1,9,12,COMPLETED\n"
    nameless = "gpus,start,end,state\n1,0,5,FAILED\n1,9,12,COMPLETED\n"
    requeued = "job_id,gpus,start,end,state\n5,1,0,5,FAILED\n5,1,9,12,COMPLETED\n"
    restarts = [read(text).failures.reasons[0].num_restarted for text in (array, nameless, requeued)]
    assert restarts == [0, 0, 1]


@pytest.mark.parametrize(
    ("reason", "category"),
    [
        ("NVLink Error", "infrastructure"),
        ("nvlink_error", "infrastructure"),
        ("FileNotFoundError", "script"),
        ("Out of Memory Error", "framework"),
        ("OUT_OF_MEMORY", "framework"),
        ("OSError", "script"),
        ("ModuleNotFoundError", "script"),
        ("cosmic rays", "unknown"),
        ("", "unknown"),
    ],
)
def test_whose_failure_a_reason_is(reason: str, category: str) -> None:
    assert category_of(reason) == category


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("job_id,state\n1,FAILED\n", "no column for the number of GPUs"),
        ("job_id,gpu_num\n1,2\n", "how long jobs ran"),
        ("job_id,gpu_num,duration\n", "holds no job"),
        ("job_id,gpu_num,duration\n1,x,5\n", "holds no job whose number of GPUs can be read"),
        ("job_id,gpu_num,duration\n1,0,5\n", "none of the 1 jobs has a GPU"),
        ("\x7fELF\x02\x01\x00\udcff\udcfe" * 99, "no column for the number of GPUs"),
        ("gpu_num,duration\n1," + "9" * 200_000 + "\n", "is no table"),
    ],
)
def test_bad_input_is_told_in_one_sentence(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_tables_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    failures = tmp_path / "failures.csv"
    failures.write_text("job_id,reason\nk1,ECC Error\n")
    with pytest.raises(UserError, match="another cluster"):
        read(acme([Job()]), failures=failures)
    with pytest.raises(UserError, match="no column job_id"):
        read("gpus,duration\n1,2\n", failures=failures)
    failures.write_text("job,why\nk1,ECC Error\n")
    with pytest.raises(UserError, match="needs the columns job_id and reason"):
        read(acme([Job()]), failures=failures)


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(it) for it in arguments])


def test_the_command_prints_one_json_object_and_draws(tmp_path: Path) -> None:
    table = tmp_path / "jobs.csv"
    table.write_bytes(b"\xef\xbb\xbf" + acme([Job(type="<a&b>\x01"), Job(state="FAILED")]).replace("\n", "\r\n").encode())
    result = run(table, "--json", "--plot", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_gpu_jobs"] == 2
    assert found["types"][0]["gpu_time_share"] == 0.5
    drawn = {path.name: ET.fromstring(path.read_text(encoding="utf-8")) for path in (tmp_path / "plots").iterdir()}
    names = {"types.svg", "states.svg", "durations.svg", "queues.svg", "gpus.svg", "demand.svg", "failures.svg"}
    assert set(drawn) == names
    assert "<a&b>?" in "".join(drawn["types.svg"].itertext())


def test_the_command_prints_tables_for_people(tmp_path: Path) -> None:
    table = tmp_path / "jobs.csv"
    table.write_text(acme([Job(type="[red]x"), Job(state="FAILED", type="Eval", gpus=1)]))
    result = run(table)
    assert result.exit_code == 0, result.output
    for told in ("2 jobs, 2 of them with GPUs", "[red]x", "How they ended", "Failures: 1", "unexplained"):
        assert told in result.stdout


def test_a_file_that_is_not_there_is_a_mistake_of_the_users(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path / "none.csv").exception, UserError)
    table = tmp_path / "jobs.csv"
    table.write_text(acme([Job()]))
    assert isinstance(run(table, "--plot", table).exception, UserError)


def test_only_one_batch_of_rows_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is read as a stream: when a batch is handed out, no more than it has been taken from the file."""
    monkeypatch.setattr(job_rows, "BATCH", 10)
    taken = 0

    class Endless(io.StringIO):
        def readline(self, size: int = -1) -> str:
            return "gpus,duration\n"

        def __next__(self) -> str:
            nonlocal taken
            taken += 1
            return "1,2\n"

    batches = job_rows.Rows(Endless(), "endless").batches()
    assert [len(next(batches)[0]) for _ in range(3)] == [10, 10, 10]
    assert taken == 30
