"""`unicron doctor` on a stand-in for NVIDIA's library: whatever the driver does, there is an answer."""

import json
from functools import partial

import psutil
import pytest
from stand_in_driver import CURRENT, build, no_driver, write
from typer.testing import CliRunner

from unicron_lib.agent.probe_life import COMMAND
from unicron_lib.cli import app, devices

HUNG_S = 5.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("driver"), *CURRENT)


@pytest.fixture
def state(driver, tmp_path, monkeypatch):
    """The file with the state of the driver, for processes that are started from now on."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(tmp_path / "gpus"))
    write(tmp_path / "gpus", "")
    return tmp_path / "gpus"


def test_a_driver_that_answers_is_told_with_its_version(state):
    ok, found = devices.gpu_watch()
    assert ok
    assert found.startswith("driver ")


def test_a_driver_that_hangs_is_told_and_leaves_no_process(state):
    write(state, "init.hang 1\n")
    assert devices.gpu_watch(deadline_s=HUNG_S) == (
        False,
        "the NVIDIA driver has not answered for 5 s: see the kernel's log, and restart the node if the driver hangs",
    )
    assert [child.cmdline() for child in psutil.Process().children() if COMMAND[-1] in child.cmdline()] == []


def test_a_driver_that_does_not_start_is_a_failure(state):
    write(state, "init 999\n")
    ok, found = devices.gpu_watch()
    assert not ok
    assert found.startswith("NVML does not start (error 999")


def test_no_driver_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(no_driver(tmp_path)))
    assert devices.gpu_watch() == (True, "no NVIDIA driver: GPU health is not watched")


def test_devices_that_are_never_counted_are_told(monkeypatch):
    monkeypatch.setattr(devices, "COUNT_DEVICES", ("sleep", "1000"))
    found = devices.num_cuda_devices(deadline_s=0.1)
    assert found.startswith("torch has not answered for 0.1 s")


def test_a_process_that_dies_of_counting_is_told(monkeypatch):
    monkeypatch.setattr(devices, "COUNT_DEVICES", ("false",))
    assert devices.num_cuda_devices() == "the process that asked torch ended without an answer: see the kernel's log"


def test_all_else_is_told_although_the_driver_hangs(state, monkeypatch):
    write(state, "init.hang 1\n")
    monkeypatch.setattr(devices, "gpu_watch", partial(devices.gpu_watch, deadline_s=HUNG_S))
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    assert shown.exit_code == 1
    findings = {finding["what"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert not findings["NVML"]["ok"]
    assert findings["solver"]["ok"]
    assert "disk" in findings
