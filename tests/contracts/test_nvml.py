"""The NVML adapter on the real pynvml, which drives a stand-in for the driver's library in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_in_driver import CURRENT, build, no_driver

READ_TWICE = """
import dataclasses, json, os, pathlib, sys
from unicron_lib.adapters.nvml import NvmlAbsent, open_nvml
describe = lambda look: dataclasses.asdict(look) if not look else [dataclasses.asdict(gpu) for gpu in look]
nvml = open_nvml()
if isinstance(nvml, NvmlAbsent):
    print(json.dumps(dataclasses.asdict(nvml)))
    sys.exit()
looks = [nvml.read()]
pathlib.Path(os.environ["NVML_STAND_IN_STATE"]).write_text(os.environ["THEN"])
looks.append(nvml.read())
print(json.dumps([describe(look) for look in looks] + [nvml.off]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in library of a current driver."""
    return build(tmp_path_factory.mktemp("driver"), *CURRENT)


def answer(library: Path, tmp_path: Path, *, first: str, then: str = "", program: str = READ_TWICE) -> Any:
    state = tmp_path / "state"
    state.write_text(first)
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STAND_IN_STATE": str(state), "THEN": then}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def read(library: Path, tmp_path: Path, *, first: str = "", then: str = "") -> Any:
    """What the adapter says with the state `first`, and what it says later with the state `then`."""
    told = answer(library, tmp_path, first=first, then=then)
    return told if isinstance(told, dict) else told[:2]


FULL = """
gpu0.ecc 3
gpu0.ecc_aggregate 5
gpu0.pending 1
gpu0.throttle 65
gpu0.links 4
gpu0.link2.down 1
gpu0.crc_flit 2
gpu0.crc_data 3
gpu0.link.errors 10
gpu0.replays 7
gpu0.recoveries 0
gpu0.action 1
"""


def test_reads_every_gpu(driver: Path, tmp_path: Path) -> None:
    (gpu, other), _ = read(driver, tmp_path, first=FULL)
    assert gpu.pop("seen_at") > 0
    assert gpu == {
        "index": 0,
        "uuid": "GPU-00000000",
        "name": "Stand-in H200",
        "temperature_c": 40,
        "temperature_limit_c": 87,
        "power_w": 350.5,
        "power_limit_w": 700.0,
        "utilization_ratio": 0.75,
        "memory_used_bytes": 2**36,
        "memory_total_bytes": 2**37,
        "mig": False,
        "ecc_uncorrected_volatile": 3,
        "ecc_uncorrected_aggregate": 5,
        "row_remap_pending": True,
        "row_remap_failure": False,
        "throttle_reasons": ["hw_thermal_slowdown"],
        "recovery_action": 1,
        "nvlinks_up": [0, 1, 3],
        "nvlink_crc_errors": 2 + 3 + 3 * 10,
        "nvlink_replays": 7,
        "nvlink_recoveries": 0,
        "lost": False,
        "error_code": None,
    }
    assert (other["index"], other["ecc_uncorrected_volatile"], other["throttle_reasons"]) == (1, 0, [])


def test_without_nvlink_there_are_no_links_and_no_counts(driver: Path, tmp_path: Path) -> None:
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.replays 7\n")
    assert [value for name, value in gpu.items() if name.startswith("nvlink")] == [None] * 4


@pytest.mark.parametrize("how", [1, 2], ids=["its metrics fail", "its handle fails"])
def test_a_lost_gpu_keeps_its_name_and_hides_no_other(driver: Path, tmp_path: Path, how: int) -> None:
    """PB01: of eight GPUs, the other seven are read as before."""
    before, after = read(driver, tmp_path, first="count 8\n", then=f"count 8\ngpu3.lost {how}\n")
    assert not any(gpu["lost"] for gpu in before)
    lost = after.pop(3)
    assert (lost["lost"], lost["error_code"], lost["uuid"], lost["temperature_c"]) == (True, 15, "GPU-00000003", None)
    assert [gpu["temperature_c"] for gpu in after] == [40] * 7


def test_a_gpu_that_was_lost_from_the_start_may_come_back(driver: Path, tmp_path: Path) -> None:
    before, after = read(driver, tmp_path, first="gpu1.lost 2\n")
    assert (before[1]["lost"], before[1]["uuid"]) == (True, None)
    assert (after[1]["lost"], after[1]["uuid"]) == (False, "GPU-00000001")


def test_the_number_of_gpus_and_who_they_are_is_asked_each_time(driver: Path, tmp_path: Path) -> None:
    before, after = read(driver, tmp_path, first="count 3\n", then="count 2\ngpu1.uuid 2\n")
    assert [gpu["uuid"] for gpu in before] == ["GPU-00000000", "GPU-00000001", "GPU-00000002"]
    assert [gpu["uuid"] for gpu in after] == ["GPU-00000000", "GPU-00000002"]


def test_a_row_that_cannot_be_remapped_is_told(driver: Path, tmp_path: Path) -> None:
    before, after = read(driver, tmp_path, then="gpu1.failure 1\n")
    assert [[gpu["row_remap_failure"] for gpu in look] for look in (before, after)] == [[False, False], [False, True]]


@pytest.mark.parametrize("key", ["handle", "err"])
def test_a_gpu_that_must_be_reset_tells_nothing_else(driver: Path, tmp_path: Path, key: str) -> None:
    (gpu, other), _ = read(driver, tmp_path, first=f"gpu0.{key} 16\n")
    assert (gpu["error_code"], gpu["lost"], gpu["power_w"], other["error_code"]) == (16, False, None, None)


def test_what_is_not_supported_is_none_and_no_error(driver: Path, tmp_path: Path) -> None:
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.err.ecc 3\ngpu0.err.limit 3\ngpu0.err.fields 3\n")
    assert (gpu["ecc_uncorrected_volatile"], gpu["temperature_limit_c"], gpu["recovery_action"]) == (None, None, None)
    assert (gpu["error_code"], gpu["power_w"]) == (None, 350.5)


def test_a_gpu_that_is_split_lacks_utilisation_and_memory(driver: Path, tmp_path: Path) -> None:
    """PB03: with MIG, utilisation is not supported, and the memory of the whole is not for us to see."""
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.mig 1\ngpu0.err.utilization 3\ngpu0.err.memory 4\n")
    assert (gpu["mig"], gpu["utilization_ratio"], gpu["memory_used_bytes"], gpu["error_code"]) == (True, None, None, None)


def test_other_errors_cost_one_metric_and_are_told(driver: Path, tmp_path: Path) -> None:
    (gpu, _), _ = read(driver, tmp_path, first="gpu0.err.power 10\n")
    assert (gpu["power_w"], gpu["error_code"], gpu["temperature_c"], gpu["lost"]) == (None, 10, 40, False)


def test_a_function_that_an_old_driver_lacks_is_none(tmp_path: Path) -> None:
    (gpu, _), _ = read(build(tmp_path), tmp_path)
    assert (gpu["row_remap_pending"], gpu["row_remap_failure"], gpu["error_code"]) == (None, None, None)
    assert gpu["uuid"] == "GPU-00000000"


@pytest.mark.parametrize("action", [0, 1, 2, 3, 4, 5, 6, 7, 42])
def test_recovery_actions_are_numbers(driver: Path, tmp_path: Path, action: int) -> None:
    """PB14: whatever the number, reading it is no error."""
    (gpu, other), _ = read(driver, tmp_path, first=f"gpu0.action {action}\n")
    assert (gpu["recovery_action"], gpu["error_code"], other["recovery_action"]) == (action, None, None)


def test_an_old_driver_is_not_asked_for_recovery_actions(driver: Path, tmp_path: Path) -> None:
    """PB14: one line says so."""
    (gpu, _), _, off = answer(driver, tmp_path, first="driver 535\ngpu0.action 1\n")
    assert (gpu["recovery_action"], gpu["error_code"]) == (None, None)
    assert off == ["recovery actions are not watched: driver 535.104.05 is older than 570"]


def test_a_binding_without_recovery_actions_is_not_asked(driver: Path, tmp_path: Path) -> None:
    """PB14: the constant is missing in an old nvidia-ml-py."""
    program = "import pynvml; del pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION\n" + READ_TWICE
    (gpu, _), _, off = answer(driver, tmp_path, first="gpu0.action 1\n", program=program)
    assert (gpu["recovery_action"], gpu["error_code"]) == (None, None)
    assert off == ["recovery actions are not watched: this version of nvidia-ml-py does not know them"]


@pytest.mark.parametrize("blinded", ["err 999\n", "gpu0.handle 999\ngpu1.err 999\n"])
def test_a_driver_that_answers_nothing_is_absent_and_its_gpus_are_not_lost(driver: Path, tmp_path: Path, blinded: str) -> None:
    """PB04: a container that lost its access to the devices."""
    _, blind = read(driver, tmp_path, then=blinded)
    assert blind["code"] == 999
    assert "error 999" in blind["reason"]


def test_a_gpu_that_cannot_be_read_hides_no_other(driver: Path, tmp_path: Path) -> None:
    (gpu, other), _ = read(driver, tmp_path, first="gpu0.err 999\n")
    assert (gpu["error_code"], gpu["lost"], gpu["temperature_c"], other["temperature_c"]) == (999, False, None, 40)


def test_a_driver_that_shows_no_gpu_is_absent(driver: Path, tmp_path: Path) -> None:
    _, blind = read(driver, tmp_path, then="count 0\n")
    assert blind["reason"] == "the driver shows no GPU"


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


READ_A_CARD = """
import dataclasses, json
from unicron_lib.adapters.nvml import open_nvml
from unicron_lib.adapters.nvml_events import XidEvents
nvml = open_nvml()
events = XidEvents()
print(json.dumps([[dataclasses.asdict(gpu) for gpu in nvml.read()], nvml.driver, [*nvml.off, *events.off]]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver is loaded here")
def test_a_real_card_is_fine() -> None:
    done = subprocess.run([sys.executable, "-c", READ_A_CARD], capture_output=True, text=True, check=True, timeout=60)
    gpus, driver, _ = json.loads(done.stdout)
    assert driver
    for gpu in gpus:
        assert gpu["uuid"].startswith(("GPU-", "MIG-"))
        assert (gpu["lost"], gpu["error_code"], gpu["row_remap_failure"] or False) == (False, None, False)
        assert 0 < gpu["temperature_c"] < 110
        assert 0 <= gpu["memory_used_bytes"] <= gpu["memory_total_bytes"]
