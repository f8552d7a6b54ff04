"""Nothing secret is written: not into the store, not into logs, not where somebody looks at a client or a target."""

import logging
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from saving_process import save

from unicron_lib.adapters.stores import open_store
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.cli.target import find_target
from unicron_lib.errors import StoreError

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAFAKEFAKEFAKEFAKE",
    "AWS_SECRET_ACCESS_KEY": "fAkEsEcReTfAkEsEcReT0123456789abcdef",
    "AWS_SESSION_TOKEN": "tOkEnTfAkEtOkEnTfAkE",
}
TOKEN = "fake-token-of-the-controller"


@pytest.fixture
def secretive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    (tmp_path / "token").write_text(TOKEN)
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UNICRON_STORE_URL", "s3://secrets/prefix")
    monkeypatch.setenv("UNICRON_CONTROLLER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("UNICRON_TOKEN_FILE", str(tmp_path / "token"))
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="secrets")
    yield
    server.stop()


def test_a_save_writes_no_secret_anywhere(
    secretive: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, logger="unicron_lib")
    store = open_store("s3://secrets/prefix")
    repository = CheckpointRepository(store, "killed")
    save(repository, 1, 1, 1000)
    repository.condemn(repository.manifest_keys()[0], "a test")
    repository.fence(2)
    save(repository, 2, 2, 1000)
    repository.collect(retain=1, generation=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError) as refused:
        open_store("s3://secrets/prefix").put("a", b"x")
    written = [store.url, repr(store), str(refused.value), caplog.text, *capfd.readouterr()]
    for key in store.list(""):
        written += [key, store.get(key).decode(errors="replace")]
    assert len(written) > 8
    assert not [text for text in written for secret in (*SECRETS.values(), TOKEN) if secret in text]


def test_a_target_does_not_show_its_secrets(secretive: None) -> None:
    target = find_target()
    assert target.token == TOKEN
    assert not [secret for secret in (*SECRETS.values(), TOKEN) if secret in repr(target)]
