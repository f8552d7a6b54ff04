"""Which of the things that logs tell of is the cause, and that nothing is made up."""

import dataclasses
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.cli.diagnosis_figures import measure
from unicron_lib.detection.exceptions import USER_TYPES
from unicron_lib.diagnosis.diagnose import diagnose, diagnose_files
from unicron_lib.diagnosis.findings import Line, as_json
from unicron_lib.diagnosis.merge import interesting
from unicron_lib.diagnosis.patterns import is_bomb, needles
from unicron_lib.diagnosis.rules import RULES, RuleSet
from unicron_lib.diagnosis.sightings import is_wanted
from unicron_lib.domain.failures import DEFAULT_SEVERITY, ErrorKind

HARDWARE = {"ecc_error", "nvlink_error", "gpu_lost", "gpu_driver_error", "invalid_dma_mapping", "node_lost", "link_flapping"}
STEPS = [
    f" iteration {n:8}/  500 | lm loss: 2.{n}E+00 | grad norm: 0.5 | number of nan iterations:   0 |" for n in range(10, 20)
]
TIMEOUT = (
    "[rank1]:[E1101 12:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:31842"
ENDED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


def log(*texts, file="job.log"):
    return [Line(file=file, number=number, text=text) for number, text in enumerate("\n".join(texts).split("\n"), 1)]


def traceback(last, *, where="/home/u/train.py"):
    return f'Traceback (most recent call last):\n  File "{where}", line 3, in <module>\n    main()\n{last}'


CAUSES = {
    "kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=1234, GPU has fallen off the bus.": "gpu_lost",
    "nvidia-device-plugin: XidCriticalError: Xid=79 on Device=GPU-1f; marking device as unhealthy": "gpu_lost",
    "pynvml.NVMLError_GpuIsLost: GPU is lost": "gpu_lost",
    "NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000001 caused by previous Xid 149": "nvlink_error",
    "NVRM: Xid (PCI:0000:dc:00): 145, RLW_CTRL Fatal XC0 i0 Link 01 (0x00000004 0x1)": "nvlink_error",
    "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered": "ecc_error",
    "NVRM: Xid (PCI:0000:dc:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: failed": "ecc_error",
    "NVRM: Xid (PCI:0000:cb:00): 109, pid=17, name=pt_main_thread, Ch 8, errorString CTX SWITCH TIMEOUT": "gpu_driver_error",
    "RuntimeError: CUDA error: system has unsupported display driver / cuda driver combination": "gpu_driver_error",
    "modprobe: ERROR: could not insert 'nvidia': No such device": "gpu_driver_error",
    "DMAR: [DMA Read NO_PASID] Request device [17:00.0] fault addr 0xfe000 [fault reason 0x06] PTE Read": "invalid_dma_mapping",
    "nvidia-peermem: nvidia_p2p_dma_map_pages failed -22": "invalid_dma_mapping",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "illegal_memory_access",
    "RuntimeError: cuda runtime error (710) : device-side assert triggered at THCTensor.cu:27": "cuda_error",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "cuda_error",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. To avoid fragmentation": "out_of_memory",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.": "out_of_memory",
    "kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python3.11,pid=88,uid=0": "out_of_memory",
    "RuntimeError: DataLoader worker (pid 88) exited unexpectedly with exit code 1.": "dataloader_error",
    "RuntimeError: Pin memory thread exited unexpectedly": "dataloader_error",
    "Monitored metric train_loss = nan is not finite. Previous best value was 2.1": "loss_anomaly",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": "loss_anomaly",
    "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.": "loss_anomaly",
    "PermissionError: The provided token has expired.": "storage_error",
    "OSError: [Errno 16] Please reduce your request rate.": "storage_error",
    "google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.example/b/x": "storage_error",
    "OSError: [Errno 122] Disk quota exceeded: '/fsx/ckpt'": "storage_error",
    "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!": "user_error",
    "hydra.errors.ConfigCompositionException: Could not override 'model.hiden'": "user_error",
    "RuntimeError: stack expects each tensor to be equal size, but got [512] at entry 0": "user_error",
    "Exception: data did not match any variant of untagged enum PyPreTokenizerTypeWrapper at line 9": "user_error",
    "train.py: error: argument --lr: invalid float value: 'x'": "user_error",
    "redis.exceptions.ConnectionError: Error 111 connecting to head:6379. Connection refused.": "connection_refused",
    "[W socket.cpp:752] [c10d] The client socket has failed to connect to [head]:29500 (errno: 111 - Connection refused).": (
        "connection_refused"
    ),
    "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('closed'))": "connection_reset",
    "n1:1:2 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer n2<36138>": "nccl_remote_error",
    "n1:3:9 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.1.1.2<5> with status=12 opcode=0 len=0": (
        "nccl_remote_error"
    ),
    "mlx5_core 0000:86:00.0 ens3f0np0: Link down": "link_flapping",
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN": "link_flapping",
    "NCCL WARN NET/IB : mlx5_0:1 Got async fatal event: local catastrophic error": "link_flapping",
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] failure detected by watchdog at work sequence id: 45390": "nccl_timeout",
    "RuntimeError: Rank 2 failed to pass monitoredBarrier in 600000 ms": "nccl_timeout",
    "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO PREEMPTION ***": "preempted",
    "EC2 spot instance interruption notice received: terminate at 10:02": "preempted",
    "torch.distributed.elastic.agent.server.api: [WARNING] Received Signals.SIGTERM death signal, shutting down": "preempted",
    "srun: error: Node failure on gpu-17": "node_lost",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes": "connection_reset",
    "n1:2:3 [0] misc/socket.cc:49 NCCL WARN Call to send to 10.0.0.2<41> failed : Broken pipe": "connection_reset",
    "[E PG NCCL.cpp:1375] [PG 0 Rank 0] Heartbeat monitor timed out! Process will be terminated": "nccl_timeout",
    "RuntimeError: One of the subprocesses has abruptly died during map operation.": "dataloader_error",
    "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=77.0 cgroup. Some of your processes": "out_of_memory",
    "ib-monitor: mlx5_4 port 1 physical state changed from LinkUp to Polling": "link_flapping",
    "health: GPU 3 ECC error: 2 uncorrectable since boot": "ecc_error",
    "[PetrelBackend] GetObject failed: SlowDown: Please reduce your request rate": "storage_error",
    "E0101 health.cc:7] expected 8 GPUs, found 7": "gpu_lost",
}


@pytest.mark.parametrize(("text", "kind"), CAUSES.items())
def test_the_words_of_many_programs_are_known(text, kind):
    is_exception = re.match(r"[\w.]+(?:Error|Exception|GpuIsLost)?: ", text) and not text.startswith(
        ("kernel", "train", "n1", "mod")
    )
    lines = log(*STEPS, traceback(text) if is_exception else text, ENDED)
    found = diagnose(lines)
    assert (found.kind, found.evidence[0].text) == (kind, text.removeprefix("[rank1]:"))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.role != "advice"], ids=lambda rule: rule.name)
def test_each_rule_finds_its_example_and_nothing_sorts_it_out_before(rule, tmp_path):
    text = rule.example
    assert any(it is rule for it, _ in RuleSet().matches(text))
    path = tmp_path / "job.log"
    path.write_text("\n".join([*STEPS, text, *STEPS]) + "\n")
    assert text in [line.text for line in interesting([path], lambda line: is_wanted(RuleSet(), line))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_are_whole_and_fast(rule):
    assert not is_bomb(rule.pattern)
    assert needles(rule.pattern), "every line would be tried"
    assert rule.mitigation
    assert rule.severity is (DEFAULT_SEVERITY[rule.kind] if rule.role != "advice" else None)


@given(st.sampled_from(RULES), st.text(max_size=60), st.text(max_size=60))
def test_a_line_that_a_rule_is_found_in_has_one_of_its_needles(rule, before, after):
    text = before + rule.example + after
    if re.search(rule.pattern, text):
        assert any(needle in text for needle in needles(rule.pattern))


@given(st.randoms(use_true_random=False))
def test_hardware_explains_the_rest_in_whatever_order_it_is_written(chance):
    xid = "NVRM: Xid (PCI:0000:4e:00): 48, pid=1, name=python3, DBE (double bit error) on FB"
    parts = [xid, TIMEOUT, traceback("RuntimeError: CUDA error: unspecified launch failure"), RESET, ENDED]
    chance.shuffle(parts)
    found = diagnose(log(*STEPS, *parts))
    assert (found.kind, found.source) == ("ecc_error", "infrastructure")
    assert {it.rule.kind for it in found.cascades} >= {"nccl_timeout", "connection_reset"}


@pytest.mark.parametrize(
    "cause", [traceback("KeyError: 'input_ids'"), traceback("torch.OutOfMemoryError: CUDA out of memory. Tried")]
)
def test_a_cause_beats_what_the_peers_report_before_it(cause):
    found = diagnose([*log(*STEPS, TIMEOUT, RESET, file="r0.log"), *log(cause, file="r5.log")])
    assert found.kind in {"user_error", "out_of_memory"}
    assert found.evidence[0].file == "r5.log"


@given(st.sampled_from(sorted(USER_TYPES)), st.sampled_from([rule for rule in RULES if rule.kind in HARDWARE]))
def test_what_users_code_raises_is_never_called_hardware(name, rule):
    found = diagnose(log(*STEPS, traceback(f"{name}: {rule.example}"), ENDED))
    assert found.kind not in HARDWARE
    assert found.source != "infrastructure"


@pytest.mark.parametrize("text", [
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "Note: this can be caused by an uncorrectable ECC error encountered earlier, or CUDA out of memory. Try again",
    "If you see CUDA error: an illegal memory access was encountered, update your driver",
    "INFO:comm:handler for ncclRemoteError and Connection reset by peer installed",
    "WARNING s3: An error occurred (SlowDown) when calling the PutObject operation, retrying in 2 s (attempt 1/5)",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
    "pcieport 0000:00:01.1: AER: Corrected error received: 0000:00:00.0",
    "dcgm: volatile uncorrectable ECC errors: 0",
    "NVRM: Xid (PCI:0000:dc:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    "Out of memory: Killed process 811 (node_exporter) total-vm:1234kB",
    "spot: interruption notice watcher started",
    "SIGTERM handler registered",
    "health: uncorrectable ECC errors detected: 0",
    "error_rate 0.0 nccl_timeout 1800 retries 0",
])  # fmt: skip
def test_what_only_sounds_like_a_failure_is_none(text):
    found = diagnose(log(*STEPS, text))
    assert (found.verdict, found.kind) == ("healthy", None), found


@pytest.mark.parametrize(
    "text", [RESET, traceback("KeyError: 'optional'"), "lm loss: nan", "nfs: server a not responding, still trying"]
)
def test_what_the_job_survived_is_no_failure(text):
    assert diagnose(log(*STEPS, text, *STEPS)).verdict == "healthy"
    assert diagnose(log(*STEPS, text)).verdict == "fault"


def test_noise_of_a_shutdown_after_a_good_end_is_no_failure():
    pipe = "[W TCPStore.cpp:137] [c10d] recvValue failed on SocketImpl(fd=64): Connection reset by peer"
    assert diagnose(log(*STEPS, "[after training is done] datetime: 2025-01-01", pipe)).verdict == "healthy"


def test_a_process_that_ended_makes_the_difference():
    """A failure before a restart was one, though the job went on after it."""
    assert diagnose(log(*STEPS, traceback("KeyError: 'x'"), ENDED, *STEPS)).kind == "user_error"


def test_a_killed_process_is_out_of_memory_only_if_the_kernel_says_so():
    dead = log(*STEPS, "Killed", "srun: error: gpu-1: task 3: Killed", file="r3.log")
    found = diagnose(dead)
    assert (found.verdict, found.kind) == ("unknown", None)
    kernel = log("Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:9kB", file="dmesg.log")
    assert diagnose([*dead, *kernel]).kind == "out_of_memory"
    worker = log(traceback("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed."), file="r0.log")
    assert diagnose([*worker, *dead]).kind == "dataloader_error"
    assert diagnose([*worker, *dead, *kernel]).kind == "out_of_memory"


def test_chained_exceptions_tell_of_the_first():
    first, second = traceback("OSError: [Errno 28] No space left on device"), traceback("RuntimeError: saving failed")
    caused = "\nThe above exception was the direct cause of the following exception:\n"
    assert diagnose(log(*STEPS, first, caused, second, ENDED)).kind == "storage_error"
    handled = "\nDuring handling of the above exception, another exception occurred:\n"
    ecc, attribute = traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered"), traceback("AttributeError: x")
    assert diagnose(log(ecc, handled, attribute)).kind == "ecc_error"


def test_hardware_that_broke_long_before_does_not_explain_a_users_mistake():
    xid, mistake = "NVRM: Xid (PCI:0000:4e:00): 48, pid=1, name=python3, DBE", traceback("KeyError: 'x'")
    assert diagnose(log(*STEPS, xid, *STEPS, *STEPS, mistake)).kind == "user_error"
    assert diagnose(log(*STEPS, xid, *STEPS, *STEPS, TIMEOUT)).kind == "ecc_error"
    kernel = Line(file="dmesg.log", number=1, text=xid, at=1_000.0)
    steps = [dataclasses.replace(line, at=1_010.0 + 400 * line.number) for line in log(*STEPS, mistake)]
    assert diagnose([kernel, *steps]).kind == "user_error"
    assert diagnose([kernel, *(dataclasses.replace(line, at=1_001.0) for line in steps)]).kind == "ecc_error"


def test_what_python_ignores_is_no_cause():
    ignored = "Exception ignored in: <function _Iter.__del__ at 0x7f>\n" + traceback(
        "AttributeError: 'x' object has no attribute 'y'"
    )
    assert diagnose(log(*STEPS, ignored)).verdict == "healthy"
    assert diagnose(log(*STEPS, ignored, traceback("ConnectionResetError: [Errno 104] Connection reset by peer"))).kind == (
        "connection_reset"
    )


def test_lines_of_others_within_a_traceback_are_heard_and_do_not_end_it():
    start, frame, code, end = traceback("KeyError: 'a'").split("\n")
    found = diagnose(log(start, frame, TIMEOUT, "WARNING: slow", code, end))
    assert (found.kind, [it.rule.kind for it in found.cascades]) == ("user_error", ["nccl_timeout"])
    assert (
        diagnose(log(start, frame, "NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU has fallen off", code, end)).kind == "gpu_lost"
    )


def test_tracebacks_of_ranks_in_one_log_do_not_mix():
    one = traceback("KeyError: 'a'").split("\n")
    two = traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered").split("\n")
    mixed = [f"[rank{rank}]: {text}" for pair in zip(one, two, strict=True) for rank, text in enumerate(pair)]
    found = diagnose(log(*mixed))
    assert found.kind == "ecc_error"
    assert {it.rule.kind for it in found.cascades} == {"user_error"}


def test_a_flapping_link_that_no_rank_complains_about_is_no_failure():
    link = log("mlx5_core 0000:86:00.0 ib2: Link down", "mlx5_core 0000:86:00.0 ib2: Link up", file="dmesg.log")
    assert diagnose(link).kind == "link_flapping"
    assert diagnose([*link, *log(*STEPS, file="r0.log")]).verdict == "healthy"
    assert diagnose([*link, *log(*STEPS, TIMEOUT, file="r0.log")]).kind == "link_flapping"


@given(st.lists(st.text(max_size=80), max_size=30))
def test_any_text_is_read_without_an_error_and_in_json(texts):
    found = diagnose(log(*texts))
    answer = json.loads(json.dumps(as_json(found)))
    assert answer.keys() >= {"kind", "severity", "root_cause", "source", "recoverable", "evidence", "cascades"}
    assert (answer["kind"] is None) is (answer["verdict"] != "fault")


def test_a_long_log_gives_the_same_answer_in_bounded_memory(tmp_path):
    path = tmp_path / "long.log"
    chance = random.Random(7)
    with path.open("w") as out:
        for number in range(60_000):
            out.write(f"[rank{chance.randrange(8)}]: CUDA error: an illegal memory access was encountered {number}\n")
            out.write(STEPS[number % 10] + "\n")
        out.write("NVRM: Xid (PCI:0000:4e:00): 94, pid=1, Contained: SM (0x1). RST: No, D-RST: No\n")
    found = diagnose_files([path])
    assert found.kind is ErrorKind.ECC_ERROR
    assert len(found.cascades) < 30


def test_the_bench_reads_its_log_rightly():
    both = ["compressed to a page", "diagnosed"]
    told = [(it.what, it.is_right) for it in measure(1)]
    assert told == [(what, True) for what in (*both, *(f"of random bytes {it}" for it in both))]
