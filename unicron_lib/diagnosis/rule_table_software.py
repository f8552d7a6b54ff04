"""What PyTorch, object stores, schedulers and users' programs say when a job fails, outside of tracebacks.

A row: name, kind, role, alternatives of its pattern, a line that it is found in.
"""

from unicron_lib.diagnosis.rule_table_hardware import CUDA_SAYS, Row
from unicron_lib.domain.failures import ErrorKind

_K = ErrorKind
_CUDA = CUDA_SAYS

ROWS: tuple[Row, ...] = (
    (
        "cuda-access",
        _K.ILLEGAL_MEMORY_ACCESS,
        "root",
        (
            r"cudaErrorMisalignedAddress",
            r"Invalid __(?:global|shared|local)__ (?:read|write|atomic) of size",
            _CUDA + (r"(?:illegal memory access|misaligned address|illegal address|invalid address space)"),
            r"an illegal memory access was encountered",
            r"CUDA_ERROR_(?:ILLEGAL|MISALIGNED)_ADDRESS",
            r"cudaErrorIllegalAddress",
            r"CUDA_EXCEPTION_\d{1,3}[^\n]{0,40}Address|CUDA Exception: [^\n]{0,40}(?:Address|address)",
        ),
        "what():  CUDA error: an illegal memory access was encountered",
    ),
    (
        "cuda-assert",
        _K.CUDA_ERROR,
        "root",
        (
            _CUDA + r"device-side assert",
            r"device-side assert triggered",
            r"CUDA_ERROR_ASSERT",
            r"cudaErrorAssert",
            r"thread: \[\d{1,6},\d{1,6},\d{1,6}\] Assertion [^\n]{1,400} failed",
        ),
        (
            "../aten/src/ATen/native/cuda/Indexing.cu:1308: indexSelectLargeIndex: block: [12,0,0], thread: "
            "[32,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
        ),
    ),
    (
        "cuda-other",
        _K.CUDA_ERROR,
        "root",
        (
            r"CUDA Exception: [A-Z]",
            r"hipError(?!String|Name|Success|NotReady|NoDevice|OutOfMemory)[A-Z]\w{4,60}",
            r"HIP error: \w",
            r"NCCL WARN Cuda failure",
            _CUDA + r"\w",
            r"\b(?:CU(?:BLAS|DNN|SPARSE|SOLVER|FFT|RAND)|NVRTC|CUSPARSELT)_STATUS_(?!SUCCESS)\w{3,40}",
            r"CUDA_ERROR_[A-Z_]{4,40}",
            (
                r"(?:cuBLAS(?:Lt)?|CUBLAS|[Cc]ublas|cuDNN|CUDNN|[Cc]udnn|cuSOLVER|cuFFT|cuSPARSE|CUTLASS|[Cc]utlass|NVTE) "
                r"(?:kernel )?(?:[Ee]rror|[Ff]ailure|failed)\b"
            ),
            r"the function failed to launch on the GPU",
            r"an internal (?:cuBLAS )?operation (?:inside the \w{2,10} library )?failed",
            r"an access to GPU memory space failed",
            r"cudaError(?!String|Name|Success|NotReady|_|Enum)[A-Z]\w{4,60}",
            r"!!!! kernel execution error",
            r"error (?:launching|in launch of) [^\n]{0,60}kernel|kernel launch (?:failed|failure)",
            r"[Cc]uda runtime error \(\d",
            r"unspecified launch failure",
            r"cudaErrorLaunchFailure",
        ),
        "RuntimeError: CUDA error: unspecified launch failure",
    ),
    (
        "gpu-memory",
        _K.OUT_OF_MEMORY,
        "root",
        (
            r"hipErrorOutOfMemory",
            r"(?:NPU|XPU|MPS backend|MUSA) out of memory",
            r"CUDA out of memory\. ",
            r"HIP out of memory\. ",
            _CUDA + r"out of memory",
            r"CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED",
            r"[Cc][Uu](?:BLAS|blas|DNN|dnn)\w{0,2} [Ee]rror: the resource allocation failed",
            r"cudaErrorMemoryAllocation",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"cudaMalloc failed: out of memory",
            r"RESOURCE_EXHAUSTED: Out of memory",
        ),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
    ),
    (
        "host-memory",
        _K.OUT_OF_MEMORY,
        "root",
        (
            r"low on resource: memory",
            r"NodeHasInsufficientMemory",
            r"killed by (?:the )?(?:kernel )?OOM\b",
            r"[Ff]ailed to allocate [\d.]{1,20} ?(?:[KMGT]i?B|bytes)\b[^\n]{0,40}(?:memory|host|pinned)",
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"Unable to allocate [\d.]{1,12} ?[KMGTP]?i?B\b",
            r"memory allocation of \d{1,20} bytes failed",
        ),
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ),
    (
        "worker-killed",
        _K.DATALOADER_ERROR,
        "root",
        (
            r"Too many open files\. Communication with the workers",
            r"unable to (?:write to|open) (?:file|shared memory object) </?torch_",
            r"FatalSampleError",
            r"[Bb]ackground thread failed",
            (
                r"(?:[Dd]ata ?[Ll]oader|[Dd]ataset|[Dd]ata|[Rr]eader|[Pp]refetch(?:er)?|[Ww]eb[Dd]ataset|grain|"
                r"litdata|[Ss]treaming|energon|DALI):?(?: process)? [Ww]orkers?\b[^\n]{0,30} (?:died|dead|crashed|"
                r"killed\b(?! on)|terminated (?:unexpectedly|abruptly)|exited (?:unexpectedly|with (?:code|signal) -?[1-9])|"
                r"hung|not responding)"
            ),
            r"\b(?:grain|litdata|energon|torchdata)\b[^\n]{0,40}\b[Ww]orker\b[^\n]{0,20} (?:crashed|died|was terminated)\b",
            r"DataLoader worker \(pid\(?s?\)?[^)\n]{0,200}\) (?:is killed|exited unexpectedly)",
            r"DataLoader timed out after",
            r"Pin memory thread exited",
            r"received 0 items of ancdata",
            r"ERROR: Unexpected (?:bus error|segmentation fault) encountered in (?:worker|data)",
            r"One of the subprocesses has abruptly died",
            r"process pool was terminated abruptly|BrokenProcessPool",
            r"insufficient shared memory",
            r"Critical error in pipeline",
        ),
        "RuntimeError: DataLoader worker (pid 48231) is killed by signal: Killed.",
    ),
    (
        "not-a-number",
        _K.LOSS_ANOMALY,
        "root",
        (
            r"[Ll]oss spikes?\b[^\n]{0,100}\b(?:stopping|aborting|abort|exiting|halting|giving up|did not help)\b",
            (
                r"(?:[Gg]rad(?:ient)?[ _]?[Nn]orm|gnorm)[ =:]{0,3}(?:is )?(?:inf|Inf)\b[^\n]{0,60}\b(?:abort|stop|"
                r"exit|terminat)"
            ),
            r"[Gg]radient overflow[^\n]{0,60}\b(?:in a row|consecutive|stopping|aborting)\b",
            r"[Ii]nvalid loss,? (?:terminating|stopping)",
            r"(?:NaN|Inf|nan) or (?:Inf|NaN|inf)[\w ]{0,12} (?:found|detected)",
            r"[Tt]raining (?:has )?diverged",
            # padded or in a table; Lightning's bars say nan.0, Megatron NAN; a best loss so far begins with inf
            (
                r"(?<!best_)(?<!best )(?<!min_)(?<!min )(?<!best_val_)[Ll]oss(?:/[\w/]{1,24})?[\"'\])]{0,2}"
                r"(?: is| became| was| has become| turned| value)?[\s=:|]{0,16}(?:tensor\()?-?"
                r"(?:[Nn][Aa][Nn]|[Ii]nf|INF|non-finite|not finite)(?![\w-])"
            ),
            (
                r"(?:[Gg]rad(?:ient)?s?[ _-]?[Nn]orm|gnorm|total_norm)[\"'\])]{0,2}(?: is| was)?[\s=:|]{0,16}"
                r"(?:tensor\()?-?(?:[Nn]aN|nan|NAN)\b"
            ),
            r"(?:[Nn]orm|[Gg]radients?|[Ll]oss|[Ll]ogits|[Aa]ctivations?)\b[^\n]{0,100} (?:is|are) (?:non-finite|not finite)\b",
            r"[Dd]etected (?:nan|NaN)(?: and/or inf)? values",
            r"Attempted loss scale: [\d.e-]{1,12}, reducing to (?:1|1\.0|0|0\.\d{1,9})\b",
            r"[Ll]oss (?:returned )?(?:in `\w{1,40}` )?(?:is|contains|became|went) (?:a )?(?:nan|NaN)",
            r"(?:too many|[Cc]onsecutive) (?:NaN|nan|non-finite|inf)\b[^\n]{0,40}(?:step|iter|loss|grad|batch)",
            r"found (?:NaN|Inf|nan|inf) in (?:local )?(?:grad|forward loss|loss|gradient)",
            r"Unexpected result (?:nan|inf)\b",
            r"is not finite\b",
            r"NaNs? (?:or [Ii]nf\w{0,6} )?(?:found|detected|encountered)\b",
            r"[Gg]radients? (?:contains?|is|are) (?:NaN|nan|Inf|non-finite)",
            r"(?:nan|NaN|inf|Inf|[Nn]on-finite)(?: values?)? (?:in the |in |detected in |found in )?(?:loss|grad)",
            r"returned nan values",
            r"[Nn]umber of nan iterations:\s{1,6}[1-9]",
            r"(?:[Ll]oss|[Tt]raining) (?:has )?(?:diverged|exploded)",
            r"Minimum loss scale reached",
            r"[Nn]on-finite loss",
            r"[Cc]urrent loss scale already at minimum",
        ),
        (
            "AssertionError: Rank 5: found NaN in local grad norm in backward pass before data-parallel "
            "communication collective."
        ),
    ),
    (
        "loss-spiked",
        _K.LOSS_ANOMALY,
        "cascade",
        (
            r"\b[Ll]oss (?:has )?spiked\b",
            r"\b[Ll]oss spike (?:detected|found|at|of)\b",
            r"[Ss]pike (?:detected )?in (?:the |train(?:ing)? )?loss\b",
        ),
        "WARNING stability: train loss spiked: 6.81 against a running mean of 2.89",
    ),
    (
        "store-refused",
        _K.STORAGE_ERROR,
        "root",
        (
            r"googleapi: Error (?:5\d\d|429|403)\b",
            r"<Error><Code>\w{3,40}</Code>",
            r"gcsfs\.retry\.\w{3,40}",
            r"fsspec\.exceptions\.\w{3,40}|\bFSTimeoutError\b",
            r"obstore\.exceptions\.\w{3,40}",
            r"Generic (?:S3|GCS|MicrosoftAzure|HTTP) error",
            r"minio\.error\.\w{3,40}|\bS3Error\b",
            (
                r"\b(?:500|502|503|504) (?:Server Error|Service Unavailable|Bad Gateway|Gateway Time-?out|"
                r"Internal Server Error)\b"
            ),
            r"\b429 (?:Client Error|Too Many Requests)\b",
            r"\b[Rr]ate ?[Ll]imit ?[Ee]xceeded\b|TooManyRequests\b",
            r"couldn't connect to '?https?://",
            r"specific connection error when trying to load",
            (
                r"(?:[Ff]ailed|[Uu]nable) to (?:upload|download|put|get|fetch|read|write|save|load|"
                r"open)\b[^\n]{0,80}\b(?:s3a?|gs|az|abfss?|hdfs|oss|oci)://"
            ),
            r"InvalidAccessKeyId|invalid_grant|AuthorizationFailure",
            r"PermissionError: (?:Access Denied|Forbidden)",
            r"(?:S3|GCS|OSS|s3|gcs|blob|[Oo]bject)\b[^\n]{0,60}\b(?:[Ss]ervice ?[Uu]navailable|[Ii]nternalError)\b",
            r"could only be (?:replicated|written) to 0 ",
            r"botocore\.exceptions\.\w{3,60}",
            r"An error occurred \(\w{1,60}\) when calling the \w{1,60} operation",
            r"\bExpiredToken(?:Exception)?\b",
            r"Unable to locate credentials",
            r"Could not connect to the endpoint URL",
            r"S3UploadFailedError",
            r"aws-error: AWS_ERROR_S3",
            r"AWS_ERROR_S3_\w{3,60}",
            r"503 Slow ?Down",
            r"google\.(?:api_core|auth|cloud)[\w.]{0,40}exceptions\.\w{3,60}",
            r"azure\.core\.exceptions\.\w{3,60}",
            r"provided token has expired",
            r"security token included in the request is (?:expired|invalid)",
            r"Please reduce your request rate",
            r"ServerBusy\b",
            r"SignatureDoesNotMatch",
            r"RequestTimeTooSkewed",
            r"\bSlowDown\b",
            r"S3Exception\b",
            r"(?:s3|storage|blob)[^\n]{0,80}[Rr]ead timed out",
        ),
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation",
    ),
    (
        "shape",
        _K.USER_ERROR,
        "root",
        (
            r"stack expects each tensor to be equal size",
            r"shape mismatch: ",
            r"(?:must|to) have (?:the )?same (?:dtype|number of dimensions)",
            r"index out of range in self",
            r"Could not override '",
            r"is not in struct",
            r"(?:FileNotFound|OS|IO|Runtime)Error: [^\n]{0,300}No such file or directory",
            r"^(?:cat|cp|mv|ls|cd|bash|sh|source|\S{1,80}\.sh|/bin/(?:ba)?sh)\b[^\n]{1,200}: No such file or directory",
            r"did not match any variant of untagged enum",
            r"do(?:es)? not match (?:the )?(?:shape|size|vocab)",
        ),
        "RuntimeError: stack expects each tensor to be equal size, but got [512] at entry 0 and [498] at entry 1",
    ),
    (
        "usage",
        _K.USER_ERROR,
        "root",
        (
            (
                r"^(?:\S{1,128}\.py|\S{1,64}): error: (?:unrecognized arguments|argument |the following arguments are "
                r"required|ambiguous option)"
            ),
            r"can't open file '?[^\n]{1,200}\[Errno 2\]",
            r"^\S{0,128}python[\d.]{0,6}: (?:No module named \w|Error while finding module specification)",
            r"ModuleNotFoundError\b",
            (
                r"\b(?:python[\d.]{0,5}|torchrun|deepspeed|accelerate|ray|mpirun|horovodrun|composer|nemo|axolotl|tune): "
                r"(?:command )?not found"
            ),
            r"OSError: Can't load (?:tokenizer|the configuration)",
        ),
        "pretrain_gpt.py: error: unrecognized arguments: --num-layer 24",
    ),
)
