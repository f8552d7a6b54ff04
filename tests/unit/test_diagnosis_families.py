"""Each family of wordings is known, whichever of its programs and versions speaks; and what only sounds like one is not."""

import pytest

from unicron_lib.diagnosis.diagnose import diagnose
from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.rules import xid_in

STEPS = [f"step {n * 10}/5000 | loss 2.{n} | lr 3.0e-4 | 812 ms" for n in range(10, 20)]
ENDED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
FRAME = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n    main()\n'

FAMILIES = {
    "ecc_error": [
        'watch: {"level":"error","msg":"policy violation","gpu":6,"condition":"Double-bit ECC error","count":1}',
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL is 1 on GPU 6",
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="6",modelName="H100"} 2',
        "    Remapping Failure Occurred           : Yes",
        '{"level":"error","gpu":2,"xid":48,"msg":"critical xid"}',
        'DCGM_FI_DEV_XID_ERRORS{gpu="3"} 95',
    ],
    "invalid_dma_mapping": [
        "arm-smmu-v3 arm-smmu-v3.3.auto: event: F_PERMISSION client: 0008:01:00.0 sid: 0x10000 ssid: 0x0 iova: 0xffe2a4c000",
        "arm-smmu 5000000.iommu: Unhandled context fault: fsr=0x402, iova=0x9f800000, fsynr=0x1",
        "NVRM: 0000:0c:00.0: DMA address not in addressable range of device (0x7f00-0x7fff, 0x0-0x7f)",
        "nvidia 0000:c1:00.0: overflow 0x0000010000000000+65536 of DMA mask 7fffffffff bus mask 0",
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: [NV_ERR_INVALID_ARGUMENT] returned from nv_dma_map_pages() @ x.c:6",
    ],
    "gpu_lost": [
        "slurmctld: error: gres/gpu: count reported lower than configured (7 < 8)",
        "prolog: nvidia-smi lists 7 GPUs, expected 8",
        "nvidia 0000:3b:00.0: Unable to change power state from D3cold to D0, device inaccessible",
    ],
    "gpu_driver_error": [
        "NVRM: Xid (PCI:0000:90:00): 61, pid=1, name=systemd, 0cec(3098) 00000000 00000000",
        "NVRM: GPU0 _kgspLogXid119: ******** GSP Timeout ********",
        "DCGM_FR_API_FAIL: Error calling NVML API nvmlDeviceGetMemoryInfo: GPU requires reset",
        "cudaErrorSystemNotReady: system not yet initialized",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
    ],
    "nvlink_error": [
        "[ERROR] [tid 2231] detected NVSwitch fatal error 20009 on fid 0 on NVSwitch pci bus id 00000000:87:00.0 port 33",
        "[ERROR] [tid 8811] failed to configure all the available GPUs or NVSwitches to route NVLink traffic",
        "Detected 5 CRC flit errors on GPU 3's NVLink which exceeds threshold of 100 per second",
    ],
    "cuda_error": [
        "RuntimeError: Triton Error [CUDA]: an illegal instruction was encountered",
        "RuntimeError: CUDA error: invalid program counter",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "RuntimeError: HIP error: unspecified launch failure",
    ],
    "illegal_memory_access": [
        "RuntimeError: CUDA error: misaligned address",
        "========= Invalid __global__ read of size 4 bytes",
        "CUDA Exception: Warp Out-of-range Address",
    ],
    "nccl_remote_error": [
        "NCCL WARN NET/OFI Request 0x7f completed with error. RC: 107. Error: 12 (x). Completed length: 0",
        "NCCL WARN socketStartConnect: Connect to 10.0.0.5<3> failed : Software caused connection abort",
        "n1:1:2 [2] proxy.cc:1495 NCCL WARN [Service thread] Error encountered progressing operation=Connect, res=6, closing",
        "UCX ERROR transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : QP access error",
    ],
    "nccl_timeout": [
        "[F PG.cpp:1557] [PG 0 Rank 0] Terminating the process after attempting to dump debug info, due to watchdog hang.",
        "[PG ID 1 Rank 6] Observed flight recorder dump signal from another rank via TCPStore.",
        "RuntimeError: Application timeout caused pair closure",
    ],
    "connection_reset": [
        "[WARNING] The node 'n3_0' has failed to send a keep-alive heartbeat to the rendezvous 'r' due to an error of type X.",
        "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
    ],
    "link_flapping": [
        "ib_monitor: mlx5_0/1: state changed 4: ACTIVE -> 1: DOWN",
        "gpud: infiniband unhealthy: 7/8 ports active, port mlx5_5 down since 12:00",
    ],
    "dataloader_error": [
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit",
        "RuntimeError: unable to write to file </torch_123_456_7>: No space left on device (28)",
        "grain: worker 3 was terminated unexpectedly: data worker 3 exited with code -9",
    ],
    "storage_error": [
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub.example/m",
        "PermissionError: Access Denied",
        "fsspec.exceptions.FSTimeoutError",
        "OSError: We couldn't connect to 'https://hub.example' to load this file",
        "nvme nvme1: controller is down; will reset: CSTS=0xffffffff",
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'",
    ],
    "loss_anomaly": [
        "ERROR: loss spike detected: 12.3 vs mean 2.3, stopping after 5 bad steps",
        "TerminateOnNaN: Batch 12: Invalid loss, terminating training",
    ],
    "preempted": [
        'nth: INF event={"Description":"Spot ITN received. Instance will be interrupted at 2026","Kind":"SPOT_ITN"}',
        "40s         Normal    Preempted    workload/job-exp-17    Preempted to accommodate a workload (UID: 8)",
        "slurmctld: preempted JobId=12 had to be killed",
        "PBS: job killed: walltime 3600 exceeded limit 3500",
    ],
    "out_of_memory": [
        "kubelet: Warning Evicted pod/t The node was low on resource: memory. Threshold quantity: 100Mi",
        "hipErrorOutOfMemory: out of memory",
    ],
}  # fmt: skip
CASES = [(text, kind) for kind, texts in FAMILIES.items() for text in texts]


def log(*texts):
    return [Line(file="job.log", number=number, text=text) for number, text in enumerate("\n".join(texts).split("\n"), 1)]


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_families_are_known(text, kind):
    is_raised = text.split(":")[0].endswith(("Error", "Exception"))
    assert diagnose(log(*STEPS, FRAME + text if is_raised else text, ENDED)).kind == kind


@pytest.mark.parametrize("text", [
    "gpud: watching xid 48, 79, 95 on 8 GPUs",
    'DCGM_FI_DEV_XID_ERRORS{gpu="0"} 0',
    'DCGM_FI_DEV_ECC_DBE_AGG_TOTAL{gpu="0"} 3',
    "    Remapping Failure Occurred           : No",
    '"OOMKilled": false, "ExitCode": 0',
    "collective timeout: 1800 s",
    "GPU support is missing for this op, using CPU",
    "wandb: ERROR Error while calling W&B API: 502 Bad Gateway (<Response [502]>)",
    "WARNING: Failed to import apex: No module named 'amp_C'",
    "W0101 12:00:00.1 1 dso_loader.cc:64] libnvinfer.so.7: cannot open shared object file: No such file or directory",
    "/bin/sh: 1: nvidia-smi: command not found",
    "mlx5_1 port 2 is not active, skipping",
    "nth: INFO no spot interruption notice",
    "sshd[811]: Connection closed by remote host",
    "nvidia-fabricmanager: [WARNING] detected NVSwitch non-fatal error 20034 on NVSwitch 1",
    "WARNING loss spiked to 4.1 at step 812 (running mean 2.4), continuing",
    "[c10d] The IPv6 network addresses of (head, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
])  # fmt: skip
def test_what_only_sounds_like_one_of_them_is_none(text):
    assert diagnose(log(*STEPS, text)).verdict == "healthy"


@pytest.mark.parametrize(("last", "kind"), [
    ("PeerGone: lost 10.128.0.7 at step 97", None),
    ("tarfile.ReadError: unexpected end of data", None),
    ("BadSample: row 3 has no text", "user_error"),
])  # fmt: skip
def test_an_exception_is_the_programs_own_only_if_its_type_is_and_it_tells_of_nothing_around_it(last, kind):
    assert diagnose(log(*STEPS, FRAME + last)).kind == kind


def test_an_own_exception_that_was_raised_since_a_peer_went_away_tells_of_that():
    handled = "\nDuring handling of the above exception, another exception occurred:\n\n"
    reset = FRAME + "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    found = diagnose(log(*STEPS, reset + handled + FRAME + "Stopped: at outer step 97"))
    assert (found.kind, found.source) == ("connection_reset", "infrastructure")


def test_what_was_tried_again_before_it_failed_is_shown():
    retried = [f"WARNING urllib3: Retrying (total={n}) after '[Errno 111] Connection refused'" for n in (2, 1, 0)]
    found = diagnose(log(*STEPS, *retried, "ERROR etcd: giving up: Connection refused", ENDED))
    assert found.kind == "connection_refused"
    assert retried[0] in [it.text for it in found.evidence]


def test_a_program_that_stops_for_its_loss_may_say_that_it_is_done():
    bad = "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.9}"
    done = "Training completed. Do not forget to share your model"
    assert diagnose(log(*STEPS, bad, bad, bad, done)).kind == "loss_anomaly"
    assert diagnose(log(*STEPS, bad, *STEPS, done)).verdict == "healthy"


@pytest.mark.parametrize("code", [12, 18, 33, 57, 61, 122])
def test_xids_of_older_drivers_explain_what_nothing_else_does(code):
    rule, _ = xid_in(f"NVRM: Xid (PCI:0000:90:00): {code}, pid=1, name=x")
    assert (rule.kind, rule.role) == ("gpu_driver_error", "root")
