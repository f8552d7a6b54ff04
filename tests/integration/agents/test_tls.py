"""The controller speaks TLS, agents and clients check its certificate."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import LocalCluster, eventually, pids, running

from unicron_lib.controller.client import ControllerClient
from unicron_lib.errors import ControllerError

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with the openssl command")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, and its key, in one file."""
    made = tmp_path / "controller.pem"
    arguments = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=controller"]
    arguments += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(["openssl", "req", *arguments], cwd=tmp_path, capture_output=True, check=True)
    made.write_text((tmp_path / "certificate.pem").read_text() + (tmp_path / "key.pem").read_text())
    return made


async def test_ranks_are_launched_and_seen_over_tls(tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with running(tmp_path, certificate=certificate) as cluster:
        assert pids(await cluster.launch())
        assert await cluster.client.job_progress("a", generation=1, world_size=2, wait_s=10)
        plain = ControllerClient(f"http://127.0.0.1:{cluster.port}", cluster.token)
        with pytest.raises(ControllerError, match="does not answer"):
            await plain.health()
        await plain.aclose()


async def test_a_certificate_of_nobody_known_is_refused(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent and client started without the CA do not talk to the controller, and say why."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    cluster = LocalCluster(tmp_path, certificate=certificate)
    monkeypatch.delenv("SSL_CERT_FILE")
    stranger = ControllerClient(f"https://127.0.0.1:{cluster.port}", cluster.token)
    try:
        await cluster.start_controller()
        with pytest.raises(ControllerError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.health()
        cluster.start_agent()

        async def explained() -> bool:
            return "CERTIFICATE_VERIFY_FAILED" in cluster.log("n0")

        await eventually(explained, "the agent tells why it cannot connect")
        assert await cluster.client.nodes() == ()
    finally:
        await asyncio.gather(stranger.aclose(), cluster.close())


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["--ssl-keyfile", "key.pem"], "without --ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "No such file"),
        (["--ssl-certfile", "key.pem"], "no TLS with key.pem"),
        (["--ssl-certfile", "certificate.pem", "--ssl-keyfile", "secret.pem"], "unencrypted key"),
    ],
)
def test_unusable_files_are_one_sentence(tmp_path: Path, certificate: Path, files: list[str], told: str) -> None:
    assert certificate.exists()
    encrypt = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", "key.pem", "-out", "secret.pem"]
    subprocess.run(encrypt, cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "token").write_text("token")
    program = [sys.executable, "-m", "unicron_lib.controller", "--port", "0", "--token-file", "token", *files]
    program += ["--store-url", tmp_path.as_uri()]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("unicron controller: ")
    assert told in line
