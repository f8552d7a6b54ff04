"""What PyTorch, NCCL, gloo, the driver, S3, data loaders and users really say, and the kind of failure it is."""

import pytest

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.detection.classify import classify
from unicron_lib.detection.exceptions import kind_of_exception, kind_of_text
from unicron_lib.domain.failures import DEFAULT_SEVERITY, ErrorKind, Severity, root_cause

K = ErrorKind
CUDA_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stack may be wrong.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA`.\n"
)
NCCL_HEAD = (
    "NCCL error in: /torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {what}, NCCL version 2.27.5\n{name}: {meaning}"
)
LOADER = (
    "Caught {0} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop\n'
    "    data = fetcher.fetch(index)\n{0}: {1}\n"
)
RENDEZVOUS = "[c10d] The client socket has failed to connect to any network address of (node-0, 29500). "
STALLED = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=117, OpType=ALLREDUCE, NumelIn=33554432, "
    "NumelOut=33554432, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)

HARDWARE = [
    ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered" + CUDA_TAIL, K.ECC_ERROR),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", K.ECC_ERROR),
    (
        "DistBackendError",
        NCCL_HEAD.format(
            what="unhandled cuda error",
            name="ncclUnhandledCudaError",
            meaning="Call to CUDA function failed.\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'",
        ),
        K.ECC_ERROR,
    ),
    ("AcceleratorError", "CUDA error: uncorrectable NVLink error detected during the execution" + CUDA_TAIL, K.NVLINK_ERROR),
    (
        "AcceleratorError",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error" + CUDA_TAIL,
        K.NVLINK_ERROR,
    ),
    ("RuntimeError", "CUDA error: mapping of buffer object failed", K.INVALID_DMA_MAPPING),
    ("RuntimeError", "CUDA driver error: invalid DMA mapping", K.INVALID_DMA_MAPPING),
    ("NVMLError_GpuIsLost", "GPU is lost", K.GPU_LOST),
    ("RuntimeError", "No CUDA GPUs are available", K.GPU_LOST),
    ("AcceleratorError", "CUDA error: no CUDA-capable device is detected" + CUDA_TAIL, K.GPU_LOST),
    (
        "RuntimeError",
        (
            "Unexpected error from cudaGetDeviceCount(). Some text. Error 803: system has unsupported "
            "display driver / cuda driver combination"
        ),
        K.GPU_DRIVER_ERROR,
    ),
    ("RuntimeError", "CUDA error: system has unsupported display driver / cuda driver combination", K.GPU_DRIVER_ERROR),
    ("RuntimeError", "CUDA error: system not yet initialized", K.GPU_DRIVER_ERROR),
    ("RuntimeError", "CUDA error: driver shutting down", K.GPU_DRIVER_ERROR),
    (
        "RuntimeError",
        (
            "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
            "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
        ),
        K.GPU_DRIVER_ERROR,
    ),
    ("NVMLError_LibRmVersionMismatch", "Driver/library version mismatch", K.GPU_DRIVER_ERROR),
    (
        "RuntimeError",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        K.GPU_DRIVER_ERROR,
    ),
]

SOFTWARE = [
    ("AcceleratorError", "CUDA error: an illegal memory access was encountered" + CUDA_TAIL, K.ILLEGAL_MEMORY_ACCESS),
    ("RuntimeError", "CUDA error: misaligned address", K.ILLEGAL_MEMORY_ACCESS),
    ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", K.ILLEGAL_MEMORY_ACCESS),
    (
        "DistBackendError",
        NCCL_HEAD.format(
            what="unhandled cuda error",
            name="ncclUnhandledCudaError",
            meaning="Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal memory access was encountered'",
        ),
        K.ILLEGAL_MEMORY_ACCESS,
    ),
    ("AcceleratorError", "CUDA error: device-side assert triggered" + CUDA_TAIL, K.CUDA_ERROR),
    ("AcceleratorError", "CUDA error: unspecified launch failure" + CUDA_TAIL, K.CUDA_ERROR),
    ("AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable" + CUDA_TAIL, K.CUDA_ERROR),
    ("AcceleratorError", "CUDA error: no kernel image is available for execution on the device" + CUDA_TAIL, K.CUDA_ERROR),
    (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
        K.CUDA_ERROR,
    ),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", K.CUDA_ERROR),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", K.OUT_OF_MEMORY),
    (
        "torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is free.",
        K.OUT_OF_MEMORY,
    ),
    ("RuntimeError", "CUDA error: out of memory", K.OUT_OF_MEMORY),
    (
        "RuntimeError",
        (
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "137438953472 bytes. Error code 12 (Cannot allocate memory)"
        ),
        K.OUT_OF_MEMORY,
    ),
    ("MemoryError", "", K.OUT_OF_MEMORY),
    ("MemoryError", "Unable to allocate 29.8 GiB for an array with shape (4000000000,) and data type float64", K.OUT_OF_MEMORY),
    ("OSError", "[Errno 12] Cannot allocate memory", K.OUT_OF_MEMORY),
    ("RuntimeError", "std::bad_alloc", K.OUT_OF_MEMORY),
    (
        "RuntimeError",
        "unable to mmap 8589934592 bytes from file </data/model.bin>: Cannot allocate memory (12)",
        K.OUT_OF_MEMORY,
    ),
    (
        "AssertionError",
        "Rank 5: found NaN in local grad norm in backward pass before data-parallel communication",
        K.LOSS_ANOMALY,
    ),
    ("RuntimeError", "Unexpected result nan (message='found NaN in local forward loss calculation')", K.LOSS_ANOMALY),
    ("ValueError", "loss is nan at iteration 300", K.LOSS_ANOMALY),
    ("FloatingPointError", "Loss is infinite or NaN!", K.LOSS_ANOMALY),
]

NETWORK = [
    ("DistBackendError", STALLED, K.NCCL_TIMEOUT),
    (
        "DistBackendError",
        f"NCCL communicator was aborted on rank 3. Original reason for failure was: {STALLED}",
        K.NCCL_TIMEOUT,
    ),
    (
        "RuntimeError",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
        K.NCCL_TIMEOUT,
    ),
    ("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 30000 ms", K.NCCL_TIMEOUT),
    ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump", K.NCCL_TIMEOUT),
    (
        "DistBackendError",
        NCCL_HEAD.format(
            what="remote process exited or there was a network error",
            name="ncclRemoteError",
            meaning="A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
            "socketProgress: Connection closed by remote peer node-3<49152>",
        ),
        K.NCCL_REMOTE_ERROR,
    ),
    (
        "DistBackendError",
        NCCL_HEAD.format(
            what="unhandled system error (run with NCCL_DEBUG=INFO for details)",
            name="ncclSystemError",
            meaning="System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
            "socketStartConnect: Connect to 10.0.0.7<43121> failed : Connection refused",
        ),
        K.CONNECTION_REFUSED,
    ),
    (
        "DistBackendError",
        NCCL_HEAD.format(what="internal error", name="ncclInternalError", meaning="Internal check failed.\nLast error:\n"),
        K.NETWORK_ERROR,
    ),
    (
        "DistBackendError",
        NCCL_HEAD.format(
            what="unhandled system error",
            name="ncclSystemError",
            meaning="Last error:\nNET/IB : mlx5_0:1 Got async event : port error",
        ),
        K.LINK_FLAPPING,
    ),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:22236", K.CONNECTION_RESET),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:446] read [10.0.0.2]:1234: Connection reset by peer", K.CONNECTION_RESET),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:799] connect [10.0.0.2]:1234: No route to host", K.NETWORK_ERROR),
    ("RuntimeError", "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error", K.NETWORK_ERROR),
    (
        "DistNetworkError",
        RENDEZVOUS + "The IPv4 network address (node-0, 29500) cannot be connected: 111 Connection refused",
        K.CONNECTION_REFUSED,
    ),
    (
        "DistNetworkError",
        "The client socket has timed out after 60000ms while trying to connect to (node-0, 29500).",
        K.NETWORK_ERROR,
    ),
    (
        "DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE",
        K.NETWORK_ERROR,
    ),
    ("ConnectionRefusedError", "[Errno 111] Connection refused", K.CONNECTION_REFUSED),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", K.CONNECTION_RESET),
    ("BrokenPipeError", "[Errno 32] Broken pipe", K.CONNECTION_RESET),
    ("gaierror", "[Errno -3] Temporary failure in name resolution", K.NETWORK_ERROR),
    ("OSError", "[Errno 113] No route to host", K.NETWORK_ERROR),
]

STORAGE = [
    (
        "botocore.exceptions.ClientError",
        "An error occurred (SlowDown) when calling the PutObject operation: reduce",
        K.STORAGE_ERROR,
    ),
    ("ClientError", "An error occurred (ExpiredToken) when calling the GetObject operation", K.STORAGE_ERROR),
    ("EndpointConnectionError", 'Could not connect to the endpoint URL: "https://bucket.s3.amazonaws.com/k"', K.STORAGE_ERROR),
    ("ConnectionClosedError", "Connection was closed before we received a valid response from endpoint URL", K.STORAGE_ERROR),
    ("NoCredentialsError", "Unable to locate credentials", K.STORAGE_ERROR),
    ("SafetensorError", "Error while deserializing header: MetadataIncompleteBuffer", K.STORAGE_ERROR),
    ("RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding central directory", K.STORAGE_ERROR),
    ("CheckpointException", "CheckpointException ranks:dict_keys([0, 3])", K.STORAGE_ERROR),
    ("CheckpointError", "shard 3 of checkpoints/iter_0000010 is damaged", K.STORAGE_ERROR),
    ("OSError", "[Errno 28] No space left on device: '/ckpt/iter_0000010/model.pt'", K.STORAGE_ERROR),
    ("OSError", "[Errno 5] Input/output error", K.STORAGE_ERROR),
    ("OSError", "[Errno 116] Stale file handle: '/mnt/nfs/data.bin'", K.STORAGE_ERROR),
    ("RuntimeError", "DataLoader worker (pid 4242) is killed by signal: Killed. ", K.DATALOADER_ERROR),
    ("RuntimeError", "DataLoader worker (pid(s) 17, 18) exited unexpectedly", K.DATALOADER_ERROR),
    (
        "RuntimeError",
        "DataLoader worker (pid 99) is killed by signal: Bus error. It is possible that dataloader's workers are out of ...",
        K.DATALOADER_ERROR,
    ),
    ("DataError", "shard 7 of the corpus has 12 tokens too few", K.DATALOADER_ERROR),
    ("OSError", LOADER.format("OSError", "[Errno 5] Input/output error"), K.STORAGE_ERROR),
]

USERS = [
    ("KeyError", "'input_ids'"),
    ("KeyError", LOADER.format("KeyError", "'input_ids'")),
    ("IndexError", "index out of range in self"),
    ("IndexError", "Dimension out of range (expected to be in range of [-2, 1], but got 2)"),
    ("AttributeError", "'GPTModel' object has no attribute 'decoderr'"),
    ("TypeError", "forward() got an unexpected keyword argument 'labels'"),
    ("ModuleNotFoundError", "No module named 'flash_attn'"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/train.bin'"),
    ("ValueError", "could not convert string to float: 'abc'"),
    ("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ("json.decoder.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)"),
    (
        "OSError",
        "Can't load tokenizer for 'meta-llama/Llama-9'. If you were trying to load it from 'https://huggingface.co/models'",
    ),
    ("OSError", "gpt-x is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x768 and 1024x50257)"),
    ("RuntimeError", LOADER.format("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)")),
    ("RuntimeError", 'Error(s) in loading state_dict for GPTModel:\n\tMissing key(s) in state_dict: "decoder.weight".'),
    ("RuntimeError", "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    ("RuntimeError", "shape '[2, 1024]' is invalid for input of size 2047"),
    ("RuntimeError", "element 0 of tensors does not require grad and does not have a grad_fn"),
    ("RuntimeError", "expected scalar type Half but found Float"),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one."),
    ("ZeroDivisionError", "division by zero"),
    ("RecursionError", "maximum recursion depth exceeded"),
    ("unicron_lib.errors.UserError", "data_path names no file"),
]

QUOTES = [
    ("ValueError", "unknown interconnect 'NVLink'"),
    ("KeyError", "'CUDA error: uncorrectable ECC error encountered'"),
    ("AssertionError", "expected an NCCL timeout of 10 minutes, got a Connection refused"),
    ("TypeError", "GPU is lost in translation: CUDA out of memory. is no float"),
    ("IndexError", "row 'CUDA error: an illegal memory access' of the error table"),
    ("NotImplementedError", "no DMA mapping for Xid 31, fallen off the bus"),
]
"""A user's own mistake whose text quotes hardware."""

CORPUS = [*HARDWARE, *SOFTWARE, *NETWORK, *STORAGE, *((name, text, K.USER_ERROR) for name, text in [*USERS, *QUOTES])]


def test_the_corpus_is_large_and_covers_the_kinds_of_the_paper() -> None:
    assert len(CORPUS) >= 60
    assert {kind for _, _, kind in CORPUS} >= {
        *(K.ECC_ERROR, K.INVALID_DMA_MAPPING, K.NVLINK_ERROR, K.GPU_DRIVER_ERROR, K.ILLEGAL_MEMORY_ACCESS, K.CUDA_ERROR),
        *(K.NETWORK_ERROR, K.NCCL_TIMEOUT, K.NCCL_REMOTE_ERROR, K.CONNECTION_REFUSED, K.CONNECTION_RESET, K.OUT_OF_MEMORY),
        *(K.STORAGE_ERROR, K.DATALOADER_ERROR, K.USER_ERROR, K.LINK_FLAPPING),
    }


@pytest.mark.parametrize(("error_type", "message", "kind"), CORPUS)
def test_the_kind(error_type: str, message: str, kind: ErrorKind) -> None:
    assert kind_of_exception(error_type, message) is kind
    assert kind_of_text(f"{error_type}: {message}") is kind, "as an error file holds it"


@pytest.mark.parametrize("error_type", ["MyError", "Exception", "ValueError", "RuntimeError", ""])
def test_hardware_needs_the_words_of_who_speaks_for_it(error_type: str) -> None:
    for text in ("NVLink", "ECC error", "DMA mapping", "the driver version", "fallen off the bus", "an illegal memory access"):
        kind = kind_of_exception(error_type, f"my benchmark of {text} has failed")
        assert DEFAULT_SEVERITY[kind] is not Severity.SEV1


@pytest.mark.parametrize(
    ("outer", "cause", "context", "kind"),
    [
        (("RuntimeError", "training failed"), "KeyError: 'x'", "", K.USER_ERROR),
        (("ValueError", "step 3 failed"), "AcceleratorError: CUDA error: uncorrectable ECC error encountered", "", K.ECC_ERROR),
        (("DistBackendError", STALLED), "OSError: [Errno 28] No space left on device", "", K.STORAGE_ERROR),
        (("DistBackendError", STALLED), "", "AcceleratorError: CUDA error: an illegal memory access", K.ILLEGAL_MEMORY_ACCESS),
        (
            ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
            "KeyError: 'x'",
            "",
            K.ILLEGAL_MEMORY_ACCESS,
        ),
        (("RuntimeError", "never seen"), "", "KeyError: 'not in the cache'", K.OTHER),
        (("KeyError", "'x'"), "ConnectionResetError: [Errno 104] Connection reset by peer", "", K.USER_ERROR),
        (
            ("CheckpointError", "not saved"),
            "EndpointConnectionError: Could not connect to the endpoint URL",
            "",
            K.STORAGE_ERROR,
        ),
    ],
)
def test_the_earliest_cause_wins(outer: tuple[str, str], cause: str, context: str, kind: ErrorKind) -> None:
    assert kind_of_exception(*outer, cause=cause, context=context) is kind


def failed(rank: int, at: float, error_type: str, message: str) -> Observation:
    body = RankFailed(
        job="a", generation=1, rank=rank, iteration=5, error_type=error_type, message=message, traceback="", parked=False
    )
    return Observation(node=f"n{rank // 2}", boot="b", seq=rank, at=at, body=body)


@pytest.mark.parametrize("late", [-0.5, 0.2, 5.0])
@pytest.mark.parametrize(
    ("root", "kind"),
    [
        (("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"), K.ECC_ERROR),
        (("KeyError", "'input_ids'"), K.USER_ERROR),
        (("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. "), K.DATALOADER_ERROR),
    ],
)
def test_the_root_wins_over_the_cascade_whenever_it_is_told(root: tuple[str, str], kind: ErrorKind, late: float) -> None:
    echoes = [
        failed(0, 10.0, "DistBackendError", STALLED),
        failed(1, 10.1, "RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:22236"),
        failed(2, 10.2, "DistBackendError", "NCCL error: ncclRemoteError: A call failed"),
    ]
    seen = [classify(observation) for observation in [*echoes, failed(5, 10.0 + late, *root)]]
    first = root_cause([failure for failure in seen if failure is not None])
    assert first is not None
    assert (first.kind, first.rank) == (kind, 5)


def test_of_causes_of_a_kind_the_earliest_of_the_node_that_was_heard_first_is_the_root() -> None:
    seen = [classify(failed(rank, 20.0 - rank, "KeyError", "'x'")) for rank in range(3)]
    first = root_cause([failure for failure in seen if failure is not None])
    assert first is not None
    assert first.rank == 1


def test_a_long_hostile_text_is_looked_at_in_part() -> None:
    text = "NCCL " * 4_000_000 + "DataLoader worker (pid " * 1_000_000 + "CUDA error: uncorrectable ECC error encountered"
    assert kind_of_exception("RuntimeError", text) is K.ECC_ERROR
