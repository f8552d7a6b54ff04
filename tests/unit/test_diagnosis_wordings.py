"""What other programs, launchers and versions say: the cause is found in their words, and what passed is no failure."""

import json

import pytest

from unicron_lib.diagnosis.diagnose import diagnose, diagnose_files
from unicron_lib.diagnosis.findings import Line

STEPS = [f"step {n * 10}/5000 | loss 2.{n} | lr 3.0e-4 | 812 ms" for n in range(10, 20)]
WATCHDOG = (
    "[E1101 {time} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600041 milliseconds before timing out."
)
REMOTE = (
    "2026-11-01T{time} [rank{rank}] ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
)
KEY_ERROR = """Traceback (most recent call last):
  File "/home/ann/train.py", line 71, in <module>
    main()
  File "/home/ann/train.py", line 60, in main
    batch["labls"]
KeyError: 'labls'"""


def log(*texts, file="job.log"):
    return [Line(file=file, number=number, text=text) for number, text in enumerate("\n".join(texts).split("\n"), 1)]


def answer(tmp_path, **logs):
    for name, texts in logs.items():
        (tmp_path / f"{name}.log").write_text("\n".join(texts) + "\n")
    return diagnose_files([tmp_path / f"{name}.log" for name in logs])


@pytest.fixture(params=["lines", "files"])
def told(request, tmp_path):
    """What is said of one log: of its lines as they are, and of what is left of them in a file after sifting."""

    def diagnosed(*texts):
        if request.param == "lines":
            return diagnose(log(*texts))
        return answer(tmp_path, job="\n".join(texts).split("\n"))

    return diagnosed


class TestSlurm:
    STEP = "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-11-01T12:00:09 ***"

    def test_a_step_that_is_cancelled_after_a_task_failed_was_not_preempted(self, told):
        failed = "srun: error: n1: task 3: Exited with exit code 1"
        found = told(*STEPS, failed, self.STEP, "train: Received SIGTERM, stopping")
        assert (found.verdict, found.kind) == ("unknown", None)
        assert told(*STEPS, KEY_ERROR, failed, self.STEP).kind == "user_error"

    @pytest.mark.parametrize("why", ["PREEMPTION", "TIME LIMIT"])
    def test_one_that_had_to_go_was(self, told, why):
        assert told(*STEPS, self.STEP).kind is None
        assert told(*STEPS, self.STEP.removesuffix("***") + f"DUE TO {why} ***").kind == "preempted"

    def test_a_job_that_is_cancelled_since_it_hangs_hung(self, told):
        cancelled = "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-11-01T12:40:09 ***"
        assert told(*STEPS, cancelled).kind == "preempted"
        assert told(*STEPS, WATCHDOG.format(time="12:00:00.1", rank=1), cancelled).kind == "nccl_timeout"


class TestEchoes:
    def test_a_remote_error_right_after_a_watchdogs_abort_is_its_echo(self, tmp_path):
        logs = {
            "r0": [*STEPS, REMOTE.format(time="12:00:00.9", rank=0)],
            "r1": [*STEPS, "2026-11-01 11:50:00 start", WATCHDOG.format(time="12:00:00.1", rank=1)],
        }
        assert answer(tmp_path, **logs).kind == "nccl_timeout"

    def test_one_that_is_a_whole_time_out_older_is_the_cause(self, tmp_path):
        logs = {
            "r0": [*STEPS, REMOTE.format(time="11:50:00.1", rank=0)],
            "r1": [*STEPS, "2026-11-01 11:50:00 start", WATCHDOG.format(time="12:00:00.1", rank=1)],
        }
        assert answer(tmp_path, **logs).kind == "nccl_remote_error"

    def test_in_one_log_without_times_the_first_counts(self, told):
        timeout, remote = WATCHDOG.format(time="12:00:00.1", rank=1), REMOTE.format(time="12:00:00.1", rank=0)[27:]
        assert told(*STEPS, timeout, remote).kind == "nccl_timeout"

    def test_the_launchers_signal_to_the_others_is_an_echo(self, told):
        remote = "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
        assert told(*STEPS, remote, "agent: Received SIGTERM").kind == "nccl_remote_error"


@pytest.mark.parametrize("text", [
    "step:   420  loss:     nan  grad_norm:     nan  memory: 61.2GiB(77%)  tps: 7,102  mfu: 41.2%",
    "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.",
    "ValueError: The loss returned in `training_step` is nan or inf.",
    "ValueError: Detected nan and/or inf values in `model.layers.3.weight`. Check your forward pass for numerical instability.",
    "Epoch 0:  12%|#2        | 120/1000 [01:20<09:50,  1.49it/s, v_num=0, train_loss=nan.0]",
    " iteration 120/ 5000 | consumed samples: 512 | lm loss: NAN | loss scale: 1.0 | number of nan iterations:   0 |",
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.4}",
    '{"step": 120, "loss": NaN, "lr": 0.0003}',
    "[batch=120/5000]: Train loss/train/total: nan",
    "iter 1200: loss nan, time 212.11ms, mfu 31.02%",
    "Epoch 0, iteration 120/4999 | lr: 0.0003 | global_step: 120 | reduced_train_loss: nan | train_step_timing in s: 2.1",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1",
    "RuntimeError: Function 'MmBackward0' returned nan values in its 0th output.",
    "train: too many non-finite losses in a row (8 steps), stopping",
    "E train.py:88] gradient norm is not finite (inf) at step 120",
])  # fmt: skip
def test_what_is_no_number_is_found_in_every_programs_words(told, text):
    is_raised = text.split(":")[0] in {"RuntimeError", "ValueError"}
    frame = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n    main()\n'
    assert told(*STEPS, frame + text if is_raised else text).kind == "loss_anomaly"


@pytest.mark.parametrize("text", [
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "early stopping: best_val_loss inf, patience 3",
    "clip: grad_norm 1.2 (max inf)",
    "model info: loss info written",
])  # fmt: skip
def test_what_only_looks_like_no_number_is_no_failure(told, text):
    assert told(*STEPS, text, STEPS[-1]).verdict == "healthy"


SLOW = (
    "ERROR ckpt: upload of shard 3 failed: An error occurred (SlowDown) when calling the PutObject operation: Reduce your rate"
)
GOING_ON = {
    "json": [json.dumps({"ts": f"{n}", "step": 1000 + n, "loss": 2.1, "tokens_per_s": 9.1}) for n in range(6)],
    "json of a logger": [json.dumps({"level": "info", "message": f"step={1000 + n} loss=2.1"}) for n in range(6)],
    "mpirun": [f"[1,mpirank:0,algo-1]<stdout>:Train: 0 [ {n}/1251]  Loss: 6.9  Time: 0.6s" for n in range(6)],
    "fairseq": [f"epoch 001: {n} / 1000 loss=9.1, ppl=551, wps=3021, gnorm=2.1, num_updates={n}" for n in range(6)],
    "lightning": [f"Epoch 0:  {n}%|#| {n}/1000 [01:20<09:50,  1.49it/s, v_num=0]" for n in range(6)],
    "torchtitan": [f"[titan] 2026-11-01 12:00:0{n},000 - root - INFO - step: {n}  loss:  2.1  tps: 7,102" for n in range(6)],
    "batch": [f"pod/t-0 Batch {n}0 of 900: accuracy 0.2{n}, 41 samples/s" for n in range(6)],
}


@pytest.mark.parametrize("steps", GOING_ON.values(), ids=GOING_ON.keys())
def test_what_passed_is_no_failure_however_iterations_are_told(told, steps):
    assert told(*steps, SLOW, *steps).verdict == "healthy"
    assert told(*steps, SLOW).kind == "storage_error"


@pytest.mark.parametrize("text", [
    "ckpt: shard 3 uploaded after 2 retries",
    "upload succeeded after 2 tries",
    "retry ok",
    "ckpt: attempt 3 succeeded",
    "s3: backing off 1.5 s ... uploaded",
    "Reconnected to store",
])  # fmt: skip
def test_a_log_that_says_that_it_worked_at_last_tells_of_no_failure(told, text):
    assert told(*STEPS, SLOW, text).verdict == "healthy"


@pytest.mark.parametrize("text", [
    "ckpt: not uploaded after 5 retries",
    "giving up after 5 attempts, nothing saved",
    "attempt 3 failed",
    "WARNING upload unsuccessful after 3 tries",
])  # fmt: skip
def test_a_log_that_says_that_it_did_not_work_does(told, text):
    assert told(*STEPS, SLOW, text).kind == "storage_error"


def test_many_iterations_count_though_only_some_come_out_of_sifting(tmp_path):
    notice = "spot: Spot instance interruption notice received, action terminate"
    assert answer(tmp_path, job=[*STEPS, notice, *(f"step {n} loss 2.1" for n in range(300))]).verdict == "healthy"
    assert answer(tmp_path, job=[*STEPS, notice, *(f"step {n} loss 2.1" for n in range(50))]).kind == "preempted"


@pytest.mark.parametrize("text", [
    "mlx5_2: port 1 link state changed from ACTIVE to DOWN",
    "ib_monitor: HCA mlx5_3 port 1: state change Active -> Down",
    "kernel: bnxt_en 0000:41:00.0 ens1f0np0: NIC Link is Down",
    "%LINEPROTO-5-UPDOWN: Line protocol on Interface Ethernet1/7, changed state to down",
    "fabric: link mlx5_0/1 became inactive",
    "rdma: link mlx5_bond_0/1 state: DOWN physical_state: DISABLED",
    "ufm: LinkErrorRecovery counter increased by 4 on mlx5_0 port 1",
])  # fmt: skip
def test_links_that_go_down_in_other_words(told, text):
    assert told(*STEPS, text, WATCHDOG.format(time="12:00:00.1", rank=1)).kind == "link_flapping"


@pytest.mark.parametrize("text", [
    "mlx5_2: port 1 link state changed from DOWN to ACTIVE",
    "kernel: mlx5_core 0000:5e:00.0 ib2: Link up",
    "rdma: link mlx5_0/1 state: ACTIVE physical_state: LINK_UP",
])  # fmt: skip
def test_links_that_come_up_are_no_failure(told, text):
    assert told(*STEPS, text).verdict == "healthy"


CUDA = {
    "/te/common/gemm/cublaslt_gemm.cu:399 in function cublas_gemm: cuBLAS Error: the function failed to launch on the GPU": (
        "cuda_error"
    ),
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`": "cuda_error",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": "cuda_error",
    "cuDNN Error: cudnn_frontend error: plan is not executable": "cuda_error",
    "/te/common/util/cuda_runtime.cpp:41 in function f: CUDA Error: an illegal memory access was encountered": (
        "illegal_memory_access"
    ),
    "CUDA error (/w/csrc/flash_attn/src/flash_fwd_launch_template.h:188): an illegal memory access was encountered": (
        "illegal_memory_access"
    ),
    "Failed: Cuda error /w/csrc/custom_all_reduce.cuh:346 'misaligned address'": "illegal_memory_access",
    "CUDA error (flash_bwd.h:9): out of memory": "out_of_memory",
    "CUDA Error: uncorrectable ECC error encountered": "ecc_error",
    "Got cutlass error: Error Internal at: 123 (CUTLASS error)": "cuda_error",
    "cuBLAS Error: an internal operation failed": "cuda_error",
    "cudaErrorLaunchTimeout: the launch timed out and was terminated": "cuda_error",
}


@pytest.mark.parametrize(("text", "kind"), CUDA.items())
def test_the_libraries_around_cuda_have_words_of_their_own(told, text, kind):
    frame = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n    main()\n'
    assert told(*STEPS, text).kind == kind
    assert told(*STEPS, frame + "RuntimeError: " + text).kind == kind


PREFIXES = (
    "[1,mpirank:0,algo-1]<stderr>:",
    "[1,3]<stderr>: ",
    "[0]<stderr>:",
    "pod/trainer-0 pytorch ",
    "[pod/trainer-0/pytorch] ",
    "trainer-0 pytorch ",
    "(pid=4242, ip=10.0.0.7) ",
    "(TrainWorker pid=4242, ip=10.0.0.7) ",
    "(RayTrainWorker(rank=3) 4242) ",
    "2026-11-01T12:00:00.123456789Z stderr F ",
    "2026-11-01 12:00:00,123 INFO launcher <w3> ",
    "Nov 01 12:00:00 n1 python[4242]: ",
    "algo-1-x7k2p | ",
    "trainer-1  | ",
    "[node-3] [stderr] ",
    "n1.cluster: ",
    "2026-11-01 12:00:00.123 | ERROR    | app.main:run:31 - ",
    "#012#3>> ",
    "w3/4 ! ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_prefix_hides_a_traceback(told, prefix):
    found = told(*(prefix + line for line in [*STEPS, *KEY_ERROR.split("\n")]))
    assert (found.verdict, found.kind) == ("fault", "user_error")
    assert "train.py:60" in found.root_cause


def test_processes_with_learnt_prefixes_do_not_mix(told):
    other = KEY_ERROR.replace("KeyError: 'labls'", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    pairs = zip(KEY_ERROR.split("\n"), other.split("\n"), strict=True)
    found = told(*(f"<<w{number}>> {text}" for pair in pairs for number, text in enumerate(pair)))
    assert found.kind == "ecc_error"
    assert {it.rule.kind for it in found.cascades} == {"user_error"}


def docker(text):
    return json.dumps({"log": text + "\n", "stream": "stderr", "time": "2026-11-01T12:00:00.1Z"})


WRAPPED = {
    "docker": [docker(line) for line in KEY_ERROR.split("\n")],
    "one message": [json.dumps({"level": "ERROR", "message": "failed", "exc_info": KEY_ERROR})],
    "escaped": [f"ERROR train: crashed: {json.dumps(KEY_ERROR)[1:-1]}"],
    "containerd and json": ["2026-11-01T12:00:00.123Z stderr F " + json.dumps({"severity": "ERROR", "message": KEY_ERROR})],
}


@pytest.mark.parametrize("lines", WRAPPED.values(), ids=WRAPPED.keys())
def test_tracebacks_in_json_are_read(told, lines):
    assert told(*STEPS, *lines).kind == "user_error"


def test_decorated_tracebacks_are_read(told):
    rich = (
        "╭──────────── Traceback (most recent call last) ────────────╮\n"
        "│ /home/ann/train.py:60 in main                             │\n"
        "│ ❱ 60     batch['labls']                                   │\n"
        "╰───────────────────────────────────────────────────────────╯\n"
        "KeyError: 'labls'"
    )
    found = told(*STEPS, rich)
    assert found.kind == "user_error"
    assert "train.py:60" in found.root_cause
    loguru = KEY_ERROR.replace('  File "/home/ann/train.py", line 71', '> File "/home/ann/train.py", line 71')
    loguru = loguru.replace("    main()", "    main()\n    └ <function main at 0x7f>")
    assert told(*STEPS, "2026-11-01 12:00:00.1 | ERROR    | __main__:<module>:71 - caught", loguru).kind == "user_error"


@pytest.mark.parametrize("text", [
    KEY_ERROR.rpartition("\n")[0],
    "\n".join(KEY_ERROR.split("\n")[:3]),
    KEY_ERROR.rpartition("\n")[0] + "\nwrapper.sh is done with it",
    "INFO launcher: process 4242 exited with code 1",
    "[launch.py:321] INFO Process 4242 exits with return code = 1",
    "command terminated with exit code 137",
    "[w3] ERROR - KeyError: 'labls'",
    "free(): invalid pointer",
    "Bus error (core dumped)",
    "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.",
    "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed).",
    '{"exitCode": 1, "reason": "Error"}',
    "n1:4242:0 Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
])  # fmt: skip
@pytest.mark.parametrize("before", [[], ["Training finished."]], ids=["", "after its end"])
def test_a_log_that_ends_badly_is_never_healthy(told, text, before):
    assert told(*STEPS, *before, text).verdict != "healthy"


@pytest.mark.parametrize("text", [
    "INFO launcher: process 4242 exited with code 0",
    "probe: GET /healthz returned status 404, completed with status: 200",
    "kernel: eth0: link state: up, flow control is disabled",
    "[launch.py:321] INFO Process 4242 exits successfully.",
    "`Trainer.fit` stopped: `max_steps=500` reached.",
    "INFO elastic: [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
])  # fmt: skip
def test_a_log_that_ends_well_is_healthy(told, text):
    assert told(*STEPS, KEY_ERROR, *STEPS, text).verdict == "healthy"
    assert told(*STEPS, text).verdict == "healthy"


@pytest.mark.parametrize("end", ["KeyError: 'NVLink error'", "ValueError: CUDA error: uncorrectable ECC error encountered"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_users_code_raises_is_no_hardware_behind_a_prefix_either(told, prefix, end):
    lines = [*STEPS, *KEY_ERROR.split("\n")[:-1], end]
    assert told(*(prefix + line for line in lines)).kind == "user_error"
