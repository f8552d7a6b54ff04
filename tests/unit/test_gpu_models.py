"""What the kernel says of a node's GPUs, and what planning makes of it."""

from pathlib import Path

from unicron_lib.agent.gpus import gpu_model, num_devices
from unicron_lib.domain.jobs import JobSpec
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
