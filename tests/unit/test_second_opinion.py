"""What a model says, over a real socket: it cannot make a right answer wrong, hold a diagnosis up, or see a secret."""

import gzip
import json
import socket
import time

import pytest
from chat_server import chat_server, drips, hangs_up, is_silent, never_ends, raw, says
from typer.testing import CliRunner

from unicron_lib.cli import app
from unicron_lib.diagnosis.chat import AT_ONCE, MAX_REPLY_BYTES
from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.llm import LlmSettings, second_opinion
from unicron_lib.diagnosis.redaction import Redactor
from unicron_lib.errors import UserError

STRANGE = "FlexFabric: lane 7 lost quorum, parity fault 0x3f"
UNKNOWN = ["step 1 | loss 2.1", STRANGE, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "]
NVLINK = {"kind": "nvlink_error", "source": "infrastructure", "recoverable": True, "root_cause": "a lane failed", "line": 2}
GENEROUS_S = 60.0
IMPATIENT_S = 1.0


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """The loopback device is reached without the proxy that a machine may have."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def lines(*texts):
    return [Line(file="job.log", number=number, text=text) for number, text in enumerate(texts, 1)]


def ask(url, texts=UNKNOWN, **keys):
    settings = LlmSettings(url=url, model="m", **{"votes": 3, "timeout_s": GENEROUS_S, **keys})
    return second_opinion(diagnose(lines(*texts)), lines(*texts), settings)


def is_unchanged(found):
    return (found.verdict, found.kind, found.confidence, found.evidence) == (
        "unknown",
        None,
        0.0,
        diagnose(lines(*UNKNOWN)).evidence,
    )


def test_most_votes_decide_with_little_confidence():
    with chat_server(says(NVLINK), says(NVLINK), says(NVLINK | {"kind": "ecc_error"})) as server:
        found = ask(server.url)
    assert (found.kind, found.evidence[0].text, found.root_cause) == ("nvlink_error", STRANGE, "a lane failed")
    assert found.confidence == pytest.approx(0.4)
    assert "2 of 3 answers of m say nvlink_error" in found.reason
    assert server.paths == ["/v1/chat/completions"] * 3


def test_what_is_asked_is_what_the_api_wants():
    with chat_server(says(NVLINK)) as server:
        ask(server.url, votes=1, key="sk-secret")
    (asked,), (headers,) = server.asked, server.headers
    assert headers["Authorization"] == "Bearer sk-secret"
    assert headers["Content-Type"] == "application/json"
    assert (asked["model"], asked["response_format"]) == ("m", {"type": "json_object"})
    system, user = asked["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "nvlink_error" in system["content"]
    assert user["content"].splitlines()[1] == f"2 {STRANGE}"


@pytest.mark.parametrize("votes", [1, 4, 15])
def test_so_many_votes_are_asked_for(votes):
    with chat_server(says(NVLINK)) as server:
        found = ask(server.url, votes=votes)
    assert (len(server.bodies), found.kind) == (votes, "nvlink_error")


@pytest.mark.parametrize("contents", [
    (NVLINK, NVLINK | {"kind": "ecc_error"}, NVLINK | {"kind": "storage_error"}),
    (NVLINK | {"kind": None},),
    (NVLINK | {"kind": "gremlins"},),
    (NVLINK | {"line": 99},),
    (NVLINK | {"line": "the second"},),
    (NVLINK | {"root_cause": "x" * 601},),
    ({"kind": "nvlink_error"},),
    ([],),
    ("I believe that it is the NVLink.",),
    ("[" * 100_000,),
    ("",),
])  # fmt: skip
def test_no_majority_of_answers_that_keep_to_the_schema_is_unknown(contents):
    with chat_server(*map(says, contents)) as server:
        found = ask(server.url)
    assert len(server.bodies) == 3
    assert is_unchanged(found)


@pytest.mark.parametrize("replies", [
    (raw(500, b"{}"),),
    (says(NVLINK), raw(500, b""), raw(503, b"")),
    (raw(307, b"", Location="http://127.0.0.1:9/"),),
    (raw(200, b"<html>no such model</html>"),),
    (raw(200, b"\xff\xfe\x00"),),
    (raw(200, b"[" * 200_000),),
    (raw(200, b"null"),),
    (raw(200, b'{"choices": []}'),),
    (raw(200, b'{"choices": [{"message": {"content": {"kind": "ecc_error"}}}]}'),),
    (raw(200, b"", Content_Length="100"),),
    (raw(200, gzip.compress(b" " * (64 << 20)), Content_Encoding="gzip"),),
    (hangs_up,),
])  # fmt: skip
def test_a_server_that_does_not_know_the_api_changes_nothing(replies):
    with chat_server(*replies) as server:
        found = ask(server.url)
    assert len(server.bodies) == 3
    assert is_unchanged(found)


DRIPPING = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000


@pytest.mark.parametrize("reply", [is_silent, drips(DRIPPING), drips(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 60_000)])
def test_a_slow_server_is_left_at_the_deadline_for_all_votes_together(reply):
    with chat_server(reply) as server:
        began = time.monotonic()
        found = ask(server.url, votes=15, timeout_s=IMPATIENT_S)
        took_s = time.monotonic() - began
    assert 1 <= len(server.bodies) <= AT_ONCE
    assert is_unchanged(found)
    assert "m gave no usable answer" in found.reason
    assert IMPATIENT_S <= took_s < 12 * IMPATIENT_S, "each vote, or each byte, has a deadline of its own"


def test_votes_that_come_in_time_count_beside_those_that_do_not():
    with chat_server(says(NVLINK), is_silent, says(NVLINK)) as server:
        found = ask(server.url, timeout_s=3.0)
    assert (found.kind, found.confidence) == ("nvlink_error", pytest.approx(0.4))


def test_a_body_without_end_is_not_read_to_the_end():
    with chat_server(never_ends) as server:
        found = ask(server.url, votes=2)
    assert is_unchanged(found)
    in_the_sockets = 16 << 20
    assert MAX_REPLY_BYTES < server.sent_bytes < 2 * MAX_REPLY_BYTES + in_the_sockets


def test_nobody_there_changes_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert is_unchanged(ask(f"http://127.0.0.1:{port}/v1"))
    assert is_unchanged(ask("http://[::1/v1"))
    assert is_unchanged(ask("http://no-such-host.invalid/v1", timeout_s=5.0))


def test_what_rules_know_is_not_asked():
    with chat_server(says(NVLINK)) as server:
        found = ask(server.url, ["OSError: [Errno 28] No space left on device"])
    assert (found.kind, server.bodies) == ("storage_error", [])


# Secrets


SECRETS = {
    "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY": "wJalr",
    "key AKIAIOSFODNN7EXAMPLE used": "AKIAIOSF",
    "Authorization: Bearer abcdef0123456789": "abcdef0123",
    "hf_AbCdEfGhIjKlMnOpQrStUv in use": "hf_AbCd",
    "wandb api_key: 'f00dfeedf00dfeedf00dfeedf00dfeedf00dfeed'": "f00dfeed",
    "connect to 10.24.0.17<48213> failed": "10.24.0.17",
    "localGid fe80:0:0:0:a288:c203:25:1": "a288",
    'File "/home/alice/secret-project/train.py", line 3': "alice",
    "mail alice@example.com": "alice@",
    "GET https://bucket.s3.amazonaws.com/a?X-Amz-Signature=1": "amazonaws",
    "host gpu-node-17 died": "gpu-node-17",
    "peer ip-10-0-3-4.ec2.internal": "ec2.internal",
}  # fmt: skip


@pytest.mark.parametrize(("text", "secret"), SECRETS.items())
def test_secrets_are_taken_out(text, secret):
    assert secret not in Redactor().clean(text)


def test_secrets_do_not_arrive():
    """Looked for in the bytes that came over the socket."""
    with chat_server(says(NVLINK)) as server:
        ask(server.url, [*SECRETS, *UNKNOWN], key="the-key-of-the-api")
    assert len(server.bodies) == 3
    for body in server.bodies:
        assert STRANGE.encode() in body
        assert [secret for secret in (*SECRETS.values(), "the-key-of-the-api") if secret.encode() in body] == []


def test_the_same_thing_keeps_one_name_and_words_stay():
    redactor = Redactor()
    one, two = redactor.clean("peer 10.0.0.7 lost"), redactor.clean("10.0.0.8 waits for 10.0.0.7")
    assert (one, two) == ("peer <ip-1> lost", "<ip-2> waits for <ip-1>")
    assert redactor.clean(STRANGE) == STRANGE


@pytest.mark.parametrize("env", [
    {"UNICRON_LLM_URL": "ftp://x", "UNICRON_LLM_MODEL": "m"},
    {"UNICRON_LLM_URL": "http://x"},
    {"UNICRON_LLM_URL": "http://x", "UNICRON_LLM_MODEL": "m", "UNICRON_LLM_VOTES": "many"},
    {"UNICRON_LLM_URL": "http://x", "UNICRON_LLM_MODEL": "m", "UNICRON_LLM_VOTES": "0"},
])  # fmt: skip
def test_unusable_settings_are_named(env):
    with pytest.raises(UserError, match="UNICRON_LLM_"):
        LlmSettings.from_env(env)
    assert LlmSettings.from_env({}) is None


@pytest.mark.parametrize("key", ["line\nend", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_in_a_sentence_without_it(key):
    with pytest.raises(UserError, match="UNICRON_LLM_KEY holds") as refused:
        LlmSettings.from_env({"UNICRON_LLM_URL": "http://x", "UNICRON_LLM_MODEL": "m", "UNICRON_LLM_KEY": key})
    assert key not in str(refused.value)


# The command


@pytest.fixture
def run(monkeypatch, tmp_path):
    def no_cluster():
        raise UserError("no cluster")

    for name in ("URL", "MODEL", "VOTES", "KEY"):
        monkeypatch.delenv(f"UNICRON_LLM_{name}", raising=False)
    monkeypatch.delenv("UNICRON_RULES", raising=False)
    monkeypatch.setattr("unicron_lib.cli.target.find_target", no_cluster)
    path = tmp_path / "job.log"
    path.write_text("\n".join(UNKNOWN))
    return lambda: json.loads(CliRunner().invoke(app, ["diagnose", str(path), "--json"]).stdout)


def test_nothing_is_asked_unless_an_endpoint_is_named(run, monkeypatch):
    with chat_server(says(NVLINK)) as server:
        monkeypatch.setenv("UNICRON_LLM_MODEL", "m")
        monkeypatch.setattr(socket.socket, "connect", refuse_to_connect)
        assert run()["kind"] is None
    assert server.bodies == []


def refuse_to_connect(*_):
    raise AssertionError("something was dialled")


def test_the_command_asks_the_endpoint_that_is_named(run, monkeypatch):
    with chat_server(says(NVLINK)) as server:
        monkeypatch.setenv("UNICRON_LLM_URL", f"{server.url}/")
        monkeypatch.setenv("UNICRON_LLM_MODEL", "m")
        monkeypatch.setenv("UNICRON_LLM_VOTES", "5")
        answer = run()
    assert (answer["kind"], answer["confidence"]) == ("nvlink_error", 0.6)
    assert (len(server.bodies), server.asked[0]["model"]) == (5, "m")
