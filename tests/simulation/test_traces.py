"""Traces as files: our format there and back, other people's read, and bad ones refused in one sentence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation import job_tables, trace_readers, traces
from unicron_lib.simulation.closed_forms import DAY_S
from unicron_lib.simulation.faults import Fault, Trace

seconds = st.floats(0, 1e6, allow_nan=False)
faults = st.builds(
    Fault,
    at_s=seconds,
    kind=st.sampled_from(ErrorKind),
    node=st.integers(0, 10**6),
    rank_share=st.floats(0, 1, exclude_max=True),
    repair_s=seconds,
)


def trace_of(some):
    return Trace(name="made up", source="here", duration_s=1e6, faults=tuple(sorted(some, key=lambda fault: fault.at_s)))


@given(st.lists(faults, max_size=5))
def test_a_trace_survives_its_file(tmp_path_factory, some):
    trace = trace_of(some)
    folder = tmp_path_factory.mktemp("traces")
    for name in ("trace.csv", "trace.json"):
        traces.write(trace, folder / name)
        assert traces.read(folder / name) == trace
        assert trace_readers.read_any(folder / name) == trace


def test_columns_that_are_left_out_have_defaults(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("# duration_s: 100\nnode,kind,at_s\n3,ecc_error,5\n")
    trace = traces.read(path)
    assert (trace.name, trace.source) == ("short", "short.csv")
    assert trace.faults == (Fault(at_s=5.0, kind=ErrorKind.ECC_ERROR, node=3),)


HEAD = "# duration_s: 100\nat_s,kind,node\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("at_s,kind,node\n1,ecc_error,0\n", "does not tell its duration_s"),
        ("# duration_s: 9\n", "no column at_s"),
        ("# duration_s: 9\nkind,node\n", "no column at_s"),
        (HEAD + "soon,ecc_error,0\n", "line 3: could not convert"),
        (HEAD + "1,ecc_error,0\n2,meteor,0\n", "line 4: 'meteor' is not a valid ErrorKind"),
        (HEAD + "1,ecc_error\n", "line 3: the fault has no node"),
        (HEAD + "1,ecc_error,0,7\n", "line 3: the fault has more cells"),
        (HEAD + "1,ecc_error,-1\n", "node of 0 or more"),
        (HEAD + "nan,ecc_error,1\n", "line 3"),
        (HEAD + "2,ecc_error,0\n1,ecc_error,0\n", "order of time"),
        (HEAD + "200,ecc_error,0\n", "within its 100 s"),
        ("# duration_s: long\nat_s,kind,node\n", "could not convert"),
        ("# duration_s: -1\nat_s,kind,node\n", "must last a finite time"),
        ("{", "no JSON"),
        ("{}", "must hold one object"),
        ('{"faults": [3], "duration_s": 9}', "fault 1: a fault must be an object"),
        ('{"faults": [], "duration_s": null}', "float"),
        ("[1]", "fault_start and fault_end"),
        ("[]", "no fault that ends"),
        ("5,add,a\n6,add,a\n", "line 2: a cannot be 'add' here"),
        ("5,remove,a\n", "line 1: a cannot be 'remove' here"),
        ("soon,add,a\n", "line 1: could not convert"),
        ("5,add,a\n4,add,b\n", "order of time"),
        ("5,add,a\n6,add\n", "line 2: found 2 cells"),
        ("2021-12-11, 11:11:30, many\n", "line 1: invalid literal"),
        ("2021-13-11, 11:11:30, 5\n", "line 1: month"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path, text, told):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.txt") as refused:
        trace_readers.read_any(path)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(UserError, match="not a text file"):
        trace_readers.read_any(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        trace_readers.read_any(tmp_path / "missing.csv")
    with pytest.raises(UserError, match=r"must end in \.csv"):
        traces.write(trace_of(()), tmp_path / "trace.xls")


def stepfun(*spells):
    return json.dumps(
        [
            {
                "node_id": server,
                "event_time": day,
                "event_type": which,
                "fault_type": {"Level": "Hardware Failure", "Desc": what},
            }
            for server, since, until, what in spells
            for day, which in ((since, "fault_start"), (until, "fault_end"))
        ]
    )


def test_stepfun_servers_are_away_until_their_faults_end(tmp_path):
    path = tmp_path / "stepfun.json"
    path.write_text(
        stepfun(("s1", 1.0, 3.0, "GPU DBE(Double Bit ECC) > Threshold"), ("s1", 2.0, 4.0, "Link Down"), ("s2", 2.5, 2.75, "x"))
    )
    trace = trace_readers.read_any(path)
    assert trace.duration_s == 4 * DAY_S
    first, second = trace.faults
    assert (first.at_s, first.repair_s, first.kind) == (DAY_S, 3 * DAY_S, ErrorKind.ECC_ERROR)
    assert (second.at_s, second.repair_s, second.kind) == (2.5 * DAY_S, 0.25 * DAY_S, ErrorKind.NODE_LOST)
    assert first.node != second.node
    assert all(fault.takes_node for fault in trace.faults)
    assert trace_readers.stepfun(path) == trace
    assert {trace_readers.stepfun(path, seed=seed).faults[0].node for seed in range(9)} != {first.node}
    with pytest.raises(UserError, match="2 servers, more than 1 nodes"):
        trace_readers.stepfun(path, num_nodes=1)


def present(trace, at_s):
    """Nodes that are there, of three."""
    return 3 - sum(fault.at_s <= at_s < fault.at_s + fault.repair_s for fault in trace.faults)


def test_a_spot_trace_keeps_its_numbers_of_nodes(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("1000,add,a\n1000,add,b\n61000,remove,a\n121000,add,c\n121000,add,d\n181000,remove,b\n241000,remove,c\n")
    trace = trace_readers.read_any(path)
    assert trace.duration_s == 240.0
    assert {fault.kind for fault in trace.faults} == {ErrorKind.PREEMPTED}
    assert [present(trace, at_s) for at_s in (0, 59, 60, 119, 120, 179, 180)] == [2, 2, 1, 1, 3, 3, 2]


def test_a_trace_of_counts_keeps_them(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text("2021-12-11, 11:00:00, 2\n2021-12-11, 11:02:00, 3\n2021-12-11, 11:01:00, 1\n2021-12-11, 11:03:00, 3\n")
    trace = trace_readers.read_any(path)
    assert trace.duration_s == 180.0
    assert [present(trace, at_s) for at_s in (0, 59, 60, 119, 120, 179)] == [2, 2, 1, 1, 3, 3]


def test_a_smaller_cluster_has_only_its_own_faults():
    trace = trace_of([Fault(at_s=1.0, kind=ErrorKind.OTHER, node=node) for node in range(5)])
    assert [fault.node for fault in trace_readers.first_nodes(trace, 2).faults] == [0, 1]


OWN = "job_id,user,gpu_num,submit_time,duration\n7,u1,8,2023-05-17 11:00:10+00:00,60\n8,u2,0,2023-05-17 11:00:00+00:00,60\n"
FORK = "job_id,arrival_time,num_iteration,gpu_workers\n3,313.0,156,8\n2,300.0,10,4\n"


def test_job_tables_of_both_formats(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(OWN)
    assert job_tables.acme(path) == (job_tables.TableJob(job="7", arrives_s=0.0, num_gpus=8, duration_s=60.0),)
    path.write_text(FORK)
    two, three = job_tables.acme(path)
    assert (two.job, two.arrives_s, two.num_gpus, two.duration_s) == ("2", 0.0, 4, 5.0)
    assert (three.job, three.arrives_s, three.num_gpus, three.duration_s) == ("3", 13.0, 8, 78.0)


def test_a_job_of_a_table_takes_as_long_as_it_took(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(FORK)
    small, large = job_tables.as_workload(job_tables.acme(path))
    assert large.work_flop / large.flops(8) == 78.0
    assert sorted(large.throughput_flops) == [2, 4, 8]
    assert small.arrives_s == 0.0
    assert [job.job for job in job_tables.as_workload(job_tables.acme(path), most_gpus=4)] == ["job-2"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n", "no table of Acme"),
        ("", "no table of Acme"),
        (FORK + "4,now,1,8\n", "line 4: could not convert"),
        (FORK + "4,1,1,0.5\n", "line 4: job 4 has 0.5 GPUs"),
        (FORK + "4,1\n", "line 4: float"),
        (FORK.splitlines()[0] + "\n", "no job that used a GPU"),
    ],
)
def test_a_bad_table_is_refused_in_a_sentence(tmp_path, text, told):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        job_tables.acme(path)
    assert told in str(refused.value)
