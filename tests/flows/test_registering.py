"""`python -m flows.deployments` with broken files and with a server that is away: one sentence, never a traceback."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from flows.deployments import load
from unicron_lib.errors import UserError

ROOT = Path(__file__).parents[2]


def deploy(url: str, *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr; nothing on stdout."""
    env = {**os.environ, "PREFECT_API_URL": url}
    program = [sys.executable, "-m", "flows.deployments", *arguments]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("unicron: ")
    return done.returncode, line


@pytest.fixture
def nowhere():
    """The address of a server that nobody answers at: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{silent.getsockname()[1]}/api"


@pytest.mark.parametrize("more", [[], ["--store-url", "file:///tmp"]], ids=["register", "prepare"])
def test_a_dead_server_is_named(nowhere: str, more: list[str]) -> None:
    code, line = deploy(nowhere, *more, str(ROOT / "prefect.yaml"))
    assert code == 1
    assert f"the Prefect server at {nowhere} does not answer" in line
    assert "set PREFECT_API_URL" in line


@pytest.fixture
def other_server():
    """The address of a server that is no Prefect server: it answers everything with the same page."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(int(self.path.split("/")[1]))
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_of_something_else_is_named(other_server: str, status: int) -> None:
    url = f"{other_server}/{status}/api"
    code, line = deploy(url, str(ROOT / "prefect.yaml"))
    assert code == 1
    assert f"registering at {url} failed" in line


def test_an_address_without_a_scheme_is_named() -> None:
    code, line = deploy("control:4200/api", str(ROOT / "prefect.yaml"))
    assert code == 1
    assert "control:4200/api" in line


def test_a_broken_file_is_one_sentence_and_needs_no_server(nowhere: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("deployments: [{name: x, entrypoint: flows.recovery.recover, parameters: {incident: [1], other: 2}}]")
    code, line = deploy(nowhere, str(ROOT / "prefect.yaml"), str(bad))
    assert code == 2
    assert "'x'" in line


def test_a_store_that_is_none_is_refused(nowhere: str) -> None:
    code, line = deploy(nowhere, "--store-url", "ftp://x", str(ROOT / "prefect.yaml"))
    assert code == 2
    assert "no object store" in line


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"entrypoint": "flows.none.recover"}, "cannot be loaded"),
        ({"entrypoint": "flows.recovery.none"}, "cannot be loaded"),
        ({"entrypoint": "flows/none.py:recover"}, "cannot be loaded"),
        ({"entrypoint": "broken_flow.f"}, "cannot be loaded: ZeroDivisionError"),
        ({"entrypoint": "flows"}, "cannot be loaded"),
        ({"entrypoint": "unicron_lib.jobfile.read_jobs"}, "is not a flow"),
        ({"parameters": {"incident": 3}}, "do not fit"),
        ({"parameters": {"incidents": "x"}}, "do not fit"),
        ({"parameters": {1: 2}}, "do not fit"),
        ({"triggers": [{"type": "event", "posture": "Sometimes"}]}, "trigger 1 is broken"),
        ({"triggers": ["always"]}, "trigger 1 is broken"),
    ],
)
def test_what_a_server_could_not_run_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object], told: str
) -> None:
    (tmp_path / "broken_flow.py").write_text("raise ZeroDivisionError")
    monkeypatch.syspath_prepend(tmp_path)
    good = {"name": "good", "entrypoint": "flows.recovery.recover"}
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"deployments": [good, {**good, "name": "bad", **wrong}]}))
    with pytest.raises(UserError, match=told) as caught:
        load(path)
    assert "'bad'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_control_plane_and_the_jobs_can_be_registered() -> None:
    found = load(ROOT / "prefect.yaml", *sorted((ROOT / "infra/jobs").glob("*.yaml")))
    control = ["recover/recover", "reconfigure/reconfigure", "check-nodes/check-nodes"]
    assert [it.full_name for it in found] == [*control, "train/gpt-a", "train/gpt-b"]
    assert [len(it.triggers) for it in found] == [1, 0, 0, 0, 0]
