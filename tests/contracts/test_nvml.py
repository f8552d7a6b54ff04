"""The NVML adapter on the real pynvml, which drives a stand-in for the driver's library in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_in_driver import REMAPPED_ROWS, build, no_driver

READ_TWICE = """
import dataclasses, json, os, pathlib, sys
from unicron_lib.adapters.nvml import NvmlAbsent, open_nvml
nvml = open_nvml()
if isinstance(nvml, NvmlAbsent):
    print(json.dumps(dataclasses.asdict(nvml)))
    sys.exit()
looks = [nvml.read()]
pathlib.Path(os.environ["NVML_STAND_IN_STATE"]).write_text(os.environ["THEN"])
looks.append(nvml.read())
nvml.close()
print(json.dumps([[dataclasses.asdict(gpu) for gpu in look] for look in looks]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in library of a current driver."""
    return build(tmp_path_factory.mktemp("driver"), REMAPPED_ROWS)


def read(library: Path, tmp_path: Path, *, first: str = "", then: str = "") -> Any:
    """What the adapter says with the state `first`, and what it says later with the state `then`."""
    state = tmp_path / "state"
    state.write_text(first)
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STAND_IN_STATE": str(state), "THEN": then}
    done = subprocess.run([sys.executable, "-c", READ_TWICE], env=env, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_reads_every_gpu(driver: Path, tmp_path: Path) -> None:
    (gpu, other), _ = read(driver, tmp_path, first="gpu0.ecc 3\ngpu0.pending 1\ngpu0.throttle 65\n")
    assert gpu == {
        "index": 0,
        "uuid": "GPU-00000000",
        "name": "Stand-in H200",
        "temperature_c": 40,
        "power_w": 350.5,
        "utilization_ratio": 0.75,
        "memory_used_bytes": 2**36,
        "memory_total_bytes": 2**37,
        "ecc_uncorrected_volatile": 3,
        "row_remap_pending": True,
        "row_remap_failure": False,
        "throttle_reasons": ["hw_thermal_slowdown"],
        "lost": False,
        "error_code": None,
    }
    assert (other["index"], other["ecc_uncorrected_volatile"], other["throttle_reasons"]) == (1, 0, [])


@pytest.mark.parametrize("how", [1, 2], ids=["its metrics fail", "its handle fails"])
def test_a_lost_gpu_keeps_its_name_and_hides_no_other(driver: Path, tmp_path: Path, how: int) -> None:
    before, after = read(driver, tmp_path, then=f"gpu0.lost {how}\n")
    assert not any(gpu["lost"] for gpu in before)
    lost, other = after
    assert (lost["lost"], lost["error_code"], lost["uuid"], lost["temperature_c"]) == (True, 15, "GPU-00000000", None)
    assert other == before[1]


def test_a_gpu_that_was_lost_from_the_start_may_come_back(driver: Path, tmp_path: Path) -> None:
    before, after = read(driver, tmp_path, first="gpu1.lost 2\n")
    assert (before[1]["lost"], before[1]["uuid"]) == (True, None)
    assert (after[1]["lost"], after[1]["uuid"]) == (False, "GPU-00000001")


def test_a_row_that_cannot_be_remapped_is_told(driver: Path, tmp_path: Path) -> None:
    before, after = read(driver, tmp_path, then="gpu1.failure 1\n")
    assert [[gpu["row_remap_failure"] for gpu in look] for look in (before, after)] == [[False, False], [False, True]]


def test_what_is_not_supported_is_none_and_no_error(driver: Path, tmp_path: Path) -> None:
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.err.ecc 3\n")
    assert (gpu["ecc_uncorrected_volatile"], gpu["error_code"], gpu["power_w"]) == (None, None, 350.5)


def test_other_errors_cost_one_metric_and_are_told(driver: Path, tmp_path: Path) -> None:
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.err.power 10\n")
    assert (gpu["power_w"], gpu["error_code"], gpu["temperature_c"], gpu["lost"]) == (None, 10, 40, False)


def test_a_function_that_an_old_driver_lacks_is_none(tmp_path: Path) -> None:
    (gpu, _), _ = read(build(tmp_path), tmp_path)
    assert (gpu["row_remap_pending"], gpu["row_remap_failure"], gpu["error_code"]) == (None, None, None)
    assert gpu["uuid"] == "GPU-00000000"


def test_a_driver_that_is_not_loaded_is_absent_with_a_reason(driver: Path, tmp_path: Path) -> None:
    absent = read(driver, tmp_path, first="init 9\n")
    assert absent["code"] == 9
    assert "not loaded" in absent["reason"]


def test_an_unknown_error_of_the_library_is_absent_with_its_code(driver: Path, tmp_path: Path) -> None:
    absent = read(driver, tmp_path, first="init 999\n")
    assert absent["code"] == 999
    assert "999" in absent["reason"]


def test_no_library_is_absent_with_a_reason(tmp_path: Path) -> None:
    absent = read(no_driver(tmp_path), tmp_path)
    assert absent["code"] == 12
    assert "no NVIDIA driver" in absent["reason"]
