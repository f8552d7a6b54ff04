"""The commands against a running cluster: what they print, and what they refuse."""

import socket

import pytest
from whole_cluster import job_file

from unicron_lib.domain.jobs import JobStatus


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def test_status_tells_nodes_jobs_and_the_ui(pair):
    found = pair.json("status")
    sizes = {row["job"]: row["gpus"] for row in found["jobs"]}
    assert (sizes["big"], sizes["small"]) == (4, 2)
    assert [row["status"] for row in found["nodes"]] == ["ready"] * 3
    assert found["ui_url"].startswith("http://127.0.0.1:")
    assert "big" in pair.cli("status").stdout


@pytest.mark.storm
def test_a_probe_that_hangs_is_shown_and_its_node_goes_on(cluster):
    """PB05: the monitoring of its GPUs is lost, the node is not, and nothing is done about it; it needs no GPU."""
    node, known = min(cluster.state.nodes), set(cluster.state.incidents)
    cluster.cli("inject", "probe-hang", node, "--amount", "30")
    cluster.wait("the note", lambda: "gpu_probe_hung" in noted(cluster)[node])
    (row,) = [row for row in cluster.json("nodes")["nodes"] if row["node"] == node]
    assert row["status"] == "ready"
    cluster.wait("its end", lambda: "gpu_probe_hung" not in noted(cluster)[node])
    assert [it for it in cluster.new_failures(known) if it.node == node] == []


def noted(cluster):
    """The notes of each node, as `unicron status` tells them."""
    return {row["node"]: row["notes"] for row in cluster.json("status")["nodes"]}


def test_incidents_and_explain_tell_why(pair):
    rows = pair.json("incidents")["incidents"]
    assert all(row["status"] in {"closed", "merged"} for row in rows)
    told = pair.cli("explain", rows[-1]["id"]).stdout
    assert rows[-1]["kind"] in told
    assert "Decision" in told or rows[-1]["status"] == "merged"
    assert "match 'inc-none'" in one_line(pair.cli("explain", "inc-none", code=2).stderr)


def test_broken_job_files_are_one_sentence_and_start_nothing(pair, tmp_path):
    before = pair.state
    cases = {
        "unknown key 'gpus'": {"gpus": 3},
        "min_gpus 5 is greater than max_gpus 2": {"min_gpus": 5, "max_gpus": 2},
        "weight is -1.0": {"weight": -1.0},
        "global_batch_size 7 is not a multiple of micro_batch_size 2": {"global_batch_size": 7, "micro_batch_size": 2},
        "leaves ranks without work": {"min_gpus": 16, "max_gpus": 16},
    }
    for sentence, keys in cases.items():
        done = pair.cli("submit", str(job_file(tmp_path, "broken", **keys)), code=2)
        assert sentence in one_line(done.stderr)
    assert "cannot be read" in one_line(pair.cli("submit", str(tmp_path / "none.yaml"), code=2).stderr)
    assert pair.state.jobs.keys() == before.jobs.keys()


def test_a_taken_name_is_refused(pair, tmp_path):
    done = pair.cli("submit", str(job_file(tmp_path, "big")), code=2)
    assert "the name big is taken" in one_line(done.stderr)


def test_a_port_in_use_is_told_and_nothing_is_left(pair, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(pair, "home", tmp_path / "other")
        done = pair.cli("up", "--prefect-port", str(taken.getsockname()[1]), code=1)
    assert "is in use" in done.stderr


def test_injecting_into_nothing_is_refused(pair):
    assert "no running job" in one_line(pair.cli("inject", "crash", "nobody/0", code=2).stderr)
    assert "ranks 0 to" in one_line(pair.cli("inject", "crash", "big/77", code=2).stderr)
    assert "unknown fault" in one_line(pair.cli("inject", "earthquake", "big/0", code=2).stderr)


def test_a_cancelled_job_ends_with_a_checkpoint_and_its_gpus_are_free(pair):
    pair.cli("cancel", "small")
    pair.calm({"big": 4})
    assert pair.state.jobs["small"].status is JobStatus.CANCELLED
    assert "no job 'small'" in one_line(pair.cli("cancel", "small", code=2).stderr)
    rows = {row["job"]: row for row in pair.json("jobs")["jobs"]}
    assert rows["small"]["status"] == "cancelled"
