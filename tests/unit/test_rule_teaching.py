"""What operators teach and what past incidents lend: none of it can make a right answer wrong."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import running_pair
from typer.testing import CliRunner

from unicron_lib.cli import app, look
from unicron_lib.cli.diagnose import of_journal
from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.incidents import diagnose_incident, past_of, with_similar
from unicron_lib.diagnosis.patterns import is_bomb
from unicron_lib.diagnosis.rules import RULES, RuleSet
from unicron_lib.diagnosis.similar import Past, nearest
from unicron_lib.diagnosis.teach import add_rule, check, read_corpus, read_rules, taught
from unicron_lib.domain.cluster import Incident
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.errors import UserError

STRANGE = "FlexFabric: lane 7 lost quorum, parity fault 0x3f"
UNKNOWN = ["step 1 | loss 2.1", STRANGE, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "]


def lines(*texts):
    return [Line(file="job.log", number=number, text=text) for number, text in enumerate(texts, 1)]


@pytest.fixture
def corpus(tmp_path):
    """Labels of a failure and of a healthy job."""
    (tmp_path / "full.log").write_text("OSError: [Errno 28] No space left on device\nexited with code 1\n")
    (tmp_path / "fine.log").write_text("FlexFabric: lane 7 trained\nstep 1 | loss 2.1\ntraining completed\n")
    labels = tmp_path / "labels.yaml"
    labels.write_text("full: {kind: storage_error}\nfine: {kind: null, files: [fine.log]}\n")
    return labels


def test_a_taught_rule_explains_what_was_unknown(tmp_path, corpus):
    assert diagnose(lines(*UNKNOWN)).verdict == "unknown"
    rule = taught(ErrorKind.NVLINK_ERROR, r"FlexFabric: lane \d+ lost quorum", STRANGE)
    assert check(rule, (), read_corpus(corpus)) == 2
    file = tmp_path / "mine" / "rules.jsonl"
    add_rule(file, rule)
    add_rule(file, rule)
    (read,) = read_rules(file)
    assert read == rule
    assert diagnose(lines(*UNKNOWN), RuleSet((*RULES, read))).kind == "nvlink_error"


@pytest.mark.parametrize(("pattern", "why"), [
    (r"lane (\d+", "no regular expression"),
    (r"(a+)+ lost quorum", "may take forever"),
    (r"FlexFabric.*lane.*lost.*quorum", "may take forever"),
    (r"(\w+) lost \1", "may take forever"),
    (r"lane 8", "not found in the line"),
    (r".", "too general"),
    (r"\d+", "too general"),
    (r"lost quorum|x?", "too general"),
    ("x" * 500, "500 characters"),
])  # fmt: skip
def test_a_rule_that_will_not_do_is_refused_in_a_sentence(pattern, why):
    with pytest.raises(UserError, match=why):
        taught(ErrorKind.NVLINK_ERROR, pattern, STRANGE)


@pytest.mark.parametrize(("pattern", "case"), [(r"FlexFabric: lane", "fine"), (r"FlexFabric|No space left", "full")])
def test_a_rule_that_breaks_a_labelled_log_is_refused(corpus, pattern, case):
    rule = taught(ErrorKind.ECC_ERROR, pattern, STRANGE)
    with pytest.raises(UserError, match=f"the logs of {case} would be called ecc_error"):
        check(rule, (), read_corpus(corpus))


@given(st.from_regex(r"[ab.(){},+*?|\\d]{1,12}", fullmatch=True))
def test_what_passes_as_no_bomb_is_quick_on_bad_lines(pattern):
    try:
        rule = taught(ErrorKind.OTHER, f"text{pattern}!", "text" + "a" * 8 + "!")
    except UserError:
        return
    found = diagnose(lines("text" + "a" * 1500, "text" + "ab" * 700), RuleSet((rule,)))
    assert found.verdict in {"fault", "healthy"}


@pytest.mark.parametrize(("pattern", "bomb"), [
    (r"a+b+c", True), (r"(?:a|aa)+$", True), (r"(?:a?a){30}$", True), (r"(x{1,500}y){1,500}", True), (r"(a|b)+", False),
    (r"a{1,60}" * 4, True), (r"[^,]{1,40}: [^,]{1,40}", False), (r"\w+ failed", False), (r".*lost", False),
])  # fmt: skip
def test_bombs(pattern, bomb):
    assert is_bomb(pattern) is bomb


def test_broken_files_are_named(tmp_path):
    rules = tmp_path / "rules.jsonl"
    rules.write_text('{"kind": "ecc_error"}\n')
    with pytest.raises(UserError, match=r"rules.jsonl:1 is no rule"):
        read_rules(rules)
    labels = tmp_path / "labels.yaml"
    labels.write_text("a: {kind: null, files: [gone.log]}")
    with pytest.raises(UserError, match=r"there is no gone.log"):
        list(read_corpus(labels))
    labels.write_text("[1]")
    with pytest.raises(UserError, match="holds no labels"):
        list(read_corpus(labels))


# Past incidents


def incident(name, kind, *evidence, at=1.0):
    about = {"kind": kind, "method": DetectionMethod.EXCEPTION, "job": "gpt-a", "node": "n1"}
    failures = tuple(
        Failure(id=f"{name}-{n}", seen_at=at + n, rank=n, evidence=text, **about) for n, text in enumerate(evidence)
    )
    times = {"opened_at": at, "updated_at": at}
    return Incident(id=name, kind=kind, severity=failures[0].severity, failures=failures, jobs=("gpt-a",), **times)


PAST = (
    Past(id="inc-1", kind=ErrorKind.NVLINK_ERROR, text="FlexFabric: lane 3 lost quorum, parity fault 0x11"),
    Past(id="inc-2", kind=ErrorKind.STORAGE_ERROR, text="bucket checkpoints refused the upload of shard 7"),
)


def test_the_nearest_incident_differs_in_numbers_only():
    (first, *_) = nearest(STRANGE, PAST)
    assert (first.past.id, round(first.share, 6)) == ("inc-1", 1.0)
    assert nearest("something else altogether", PAST) == ()
    assert nearest("", PAST) == nearest(STRANGE, ()) == ()


@given(st.lists(st.text(max_size=60), max_size=6), st.text(max_size=60))
def test_likeness_is_between_nothing_and_the_same(texts, text):
    past = [Past(id=str(n), kind=ErrorKind.OTHER, text=it) for n, it in enumerate(texts)]
    assert all(0.3 <= it.share <= 1 + 1e-9 for it in nearest(text, past, limit=10))


def test_a_past_incident_lends_its_kind_only_where_no_rule_knows():
    unknown = diagnose(lines(STRANGE, "exited with code 1"))
    unknown = dataclasses.replace(unknown, evidence=(lines(STRANGE)[0],))
    found = with_similar(unknown, PAST)
    assert (found.kind, found.verdict, found.similar) == ("nvlink_error", "fault", ("inc-1",))
    assert found.confidence <= 0.5
    known = diagnose(lines("OSError: [Errno 28] No space left on device"))
    assert with_similar(known, PAST).kind == "storage_error"


def test_an_incident_is_told_by_its_own_words_or_as_it_was_detected():
    xid = incident("inc-x", ErrorKind.NCCL_TIMEOUT, "NVRM: Xid (PCI:0000:4e:00): 48, pid=1, DBE (double bit error)")
    found = diagnose_incident(xid)
    assert found.kind == "ecc_error"
    assert "the recovery took it for nccl_timeout" in found.reason
    assert diagnose_incident(incident("inc-y", ErrorKind.TASK_HANG, "no iteration for 90 s")).kind == "task_hang"


# The command


def no_cluster():
    raise UserError("no cluster")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("UNICRON_RULES", raising=False)
    monkeypatch.delenv("UNICRON_LLM_URL", raising=False)
    monkeypatch.setattr("unicron_lib.cli.target.find_target", no_cluster)
    return lambda *args: CliRunner().invoke(app, ["diagnose", *map(str, args)])


def test_the_command_keeps_its_contract(run, tmp_path):
    path = tmp_path / "r3.log"
    path.write_text("step 1 | loss 2.1\nOSError: [Errno 28] No space left on device\n")
    answer = json.loads(run(path, "--json").stdout)
    assert answer["kind"] == "storage_error"
    assert answer["severity"] == "SEV3"
    assert answer["evidence"][0] | {"file": "r3.log"} == {
        "file": "r3.log", "line": 2, "text": "OSError: [Errno 28] No space left on device",
    }  # fmt: skip
    assert "storage_error" in run(path).stdout
    path.write_text("step 1 | loss 2.1\n")
    healthy = run(path, "--json")
    assert (healthy.exit_code, json.loads(healthy.stdout)["kind"]) == (0, None)


def test_the_command_shows_logs_as_a_page(run, tmp_path):
    path = tmp_path / "r3.log"
    path.write_text("loader: shard 17 is slow, retrying\n" * 5000 + "OSError: [Errno 28] No space left on device\n")
    shown = run(path, "--page")
    assert shown.exit_code == 0
    assert "5001 lines" in shown.stdout
    assert "r3.log:1 x5000, last r3.log:5000  loader: shard 17" in shown.stdout
    assert "r3.log:5001  OSError" in shown.stdout
    assert json.loads(run(path, "--page", "--json").stdout)["page"] == shown.stdout.splitlines()
    missing = run(tmp_path / "no.log", "--page")
    assert isinstance(missing.exception, UserError)


def test_the_command_teaches(run, tmp_path, corpus):
    path, rules = tmp_path / "job.log", tmp_path / "rules.jsonl"
    path.write_text("\n".join(UNKNOWN))
    teach = (path, "--confirm", "nvlink_error", "--line", 2, "--rule", r"lane \d+ lost quorum", "--rules", rules)
    assert json.loads(run(*teach, "--corpus", corpus, "--json").stdout)["cases"] == 2
    assert json.loads(run(path, "--rules", rules, "--json").stdout)["kind"] == "nvlink_error"
    assert json.loads(run(path, "--json").stdout)["kind"] is None


@pytest.mark.parametrize("args", [
    ["{log}", "--confirm", "nvlink_error"],
    ["{log}", "--confirm", "gremlins", "--line", "1", "--rule", "loss", "--rules", "r"],
    ["{log}", "--confirm", "ecc_error", "--line", "99", "--rule", "loss", "--rules", "r"],
    ["{log}", "nothing-there"],
    ["no/such.log"],
])  # fmt: skip
def test_wrong_usage_is_a_sentence(run, tmp_path, args):
    path = tmp_path / "job.log"
    path.write_text("step 1 | loss 2.1\n")
    result = run(*(arg.format(log=path) for arg in args))
    assert isinstance(result.exception, UserError)
    assert "\n" not in str(result.exception)


def test_jobs_and_incidents_are_found_in_the_journal(monkeypatch):
    state = running_pair().state
    contained = incident("inc-ab", ErrorKind.NCCL_TIMEOUT, "NVRM: Xid (PCI:0000:4e:00): 94, pid=1, Contained", at=9.0)
    for it in (incident("inc-aa", ErrorKind.STORAGE_ERROR, "OSError: [Errno 5] Input/output error"), contained):
        state = state.with_incident(it)
    monkeypatch.setattr(look, "read_state", lambda _: state)
    monkeypatch.setattr("unicron_lib.cli.target.find_target", lambda: None)
    assert of_journal("inc-aa", RuleSet()).kind == "storage_error"
    assert of_journal("gpt-a", RuleSet()).kind == "ecc_error"
    assert {it.id for it in past_of(state, but="inc-ab")} == {"inc-aa"}
    for name in ("inc-", "gpt-b", "nobody"):
        with pytest.raises(UserError):
            of_journal(name, RuleSet())


def test_logs_that_no_rule_explains_are_compared_with_the_journal(run, monkeypatch, tmp_path):
    killed = "srun: error: gpu-9: task 1: Killed"
    state = running_pair().state.with_incident(incident("inc-aa", ErrorKind.NVLINK_ERROR, f"{STRANGE}\n{killed}"))
    state = state.with_incident(incident("inc-ab", ErrorKind.ECC_ERROR, killed))
    path = tmp_path / "job.log"
    path.write_text(f"step 1 | loss 2.1\n{STRANGE}\n{killed}\n")
    assert json.loads(run(path, "--json").stdout)["verdict"] == "unknown"
    monkeypatch.setattr(look, "read_state", lambda _: state)
    monkeypatch.setattr("unicron_lib.cli.target.find_target", lambda: None)
    answer = json.loads(run(path, "--json").stdout)
    assert (answer["kind"], answer["similar"]) == ("nvlink_error", ["inc-aa"])
    assert answer["confidence"] <= 0.5
    path.write_text(f"step 1 | loss 2.1\n{killed}\n")
    assert json.loads(run(path, "--json").stdout)["kind"] is None
