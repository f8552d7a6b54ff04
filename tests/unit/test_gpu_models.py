"""What the kernel says of a node's GPUs, and what planning makes of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from unicron_lib.agent.__main__ import _agent_options, _parser
from unicron_lib.agent.gpus import gpu_model, num_devices
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.local.programs import agent_program
from unicron_lib.planning.throughput import profiles


def test_the_model_is_read_without_the_driver(tmp_path: Path) -> None:
    assert (gpu_model(tmp_path), num_devices(tmp_path)) == ("", 0)
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert gpu_model(tmp_path) == ""
    told = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-1\n"
    (tmp_path / "proc/driver/nvidia/gpus/0000:65:00.0/information").write_text(told)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    assert (gpu_model(tmp_path), num_devices(tmp_path)) == ("NVIDIA H100 80GB HBM3", 1)


def test_jobs_without_a_table_are_modelled_on_the_devices_that_are_there() -> None:
    spec = JobSpec(job="a", num_layers=24, hidden_size=2048, num_attention_heads=16, global_batch_size=512, seq_length=2048)

    def flops(*models: str) -> float:
        return profiles([spec], {}, gpu_models=models)["a"].flops(8)

    assert flops() == flops("") == flops("Matrox G200")
    assert flops() < flops("NVIDIA A800-SXM4-80GB") == flops("NVIDIA A100-SXM4-80GB") < flops("NVIDIA H100 80GB HBM3")
    assert flops("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB") == flops("NVIDIA H100 80GB HBM3")
    assert flops("NVIDIA H200") >= flops("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("num_devices", "words", "has_gpus"),
    [
        (0, "--num-gpus 8", False),
        (7, "--num-gpus 8", True),
        (8, "--num-gpus 4", True),
        (8, "--num-gpus 0", False),
        (1, "--num-gpus 2 --imagined-gpus", False),
    ],
)
def test_a_node_that_lacks_a_gpu_at_its_start_has_gpus_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, words: str, *, has_gpus: bool
) -> None:
    """So that the missing one is missed; only GPUs that are imagined, or where there are none, need not be there."""
    monkeypatch.setattr("unicron_lib.agent.__main__.num_devices", lambda: num_devices)
    (tmp_path / "token").write_text("t" * 32)
    place = f"--controller ws://x --token-file {tmp_path / 'token'} --node n --address x --run-dir {tmp_path}"
    options = _agent_options(_parser().parse_args(f"{place} {words}".split()))
    assert options.facts.has_gpus is has_gpus


@pytest.mark.parametrize(("num_devices", "imagined"), [(0, True), (1, True), (2, False), (8, False)])
def test_a_local_cluster_of_more_gpus_than_there_are_imagines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, *, imagined: bool
) -> None:
    monkeypatch.setattr("unicron_lib.local.programs.num_devices", lambda: num_devices)
    site = SimpleNamespace(
        controller_port=1, token_file=tmp_path, address=str, gpus_per_node=2, run_dir=tmp_path, logs=tmp_path
    )
    assert ("--imagined-gpus" in agent_program(site, "n").arguments) is imagined
