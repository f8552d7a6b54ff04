"""What the kernel, the driver and the tools around them say of broken GPUs and of the links and buses between them.

A row: name, kind, role, alternatives of its pattern, a line that it is found in. Xids have a table of their own.
"""

from unicron_lib.diagnosis.findings import Role
from unicron_lib.domain.failures import ErrorKind

Row = tuple[str, ErrorKind, Role, tuple[str, ...], str]
_K = ErrorKind
CUDA_SAYS = (
    r"(?:C[Uu][Dd][Aa] (?:driver )?[Ee]rror(?: ?[\d(/][^\n:']{0,64})?[:'] ?'?|Cuda failure (?:\d{1,4} )?'?|"
    r"[Cc]uda runtime error \(\d{1,4}\) ?: |Triton Error \[CUDA\]: )[^\n]{0,32}?"
)
"""Who speaks before the driver's own words."""
_CUDA = CUDA_SAYS

ROWS: tuple[Row, ...] = (
    (
        "cuda-ecc",
        _K.ECC_ERROR,
        "root",
        (
            _CUDA + r"(?:uncorrectable ECC|double.bit ECC|ECC error)",
            r"uncorrectable ECC error encountered",
            r"ECCUncorrectable\b",
        ),
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    (
        "ecc-counted",
        _K.ECC_ERROR,
        "root",
        (
            r"(?:ECC_DBE_VOL_TOTAL|ecc_(?:dbe|uncorrect(?:ed|able))_vol\w{0,16})\"?(?: is |[=:] ?| )[1-9]",
            r"ECC_DBE_VOL_TOTAL\{[^}\n]{1,400}\} [1-9]",
            (
                r"(?:[Vv]iolat\w{2,4}|[Cc]ondition\"?[:=])[^\n]{0,40}(?:[Dd]ouble.[Bb]it|DBE|[Uu]ncorrect(?:ed|"
                r"able))(?: \w{1,8})? (?:ECC|memory)"
            ),
            (
                r"\b[1-9]\d{0,9} (?:volatile )?(?:[Uu]ncorrect(?:able|ed)|[Dd]ouble.[Bb]it) (?:\w{1,8} )?(?:ECC|"
                r"memory) errors?\b(?! \(?aggregate)"
            ),
            r"[Rr]emapping [Ff]ailure [Oo]ccurred\s{0,20}:? ?(?:Yes|YES|1)\b",
            r"SRAM [Tt]hreshold [Ee]xceeded\s{0,20}:? ?(?:Yes|YES|1)\b",
            r"ROW_REMAP_FAILURE(?:\{[^}\n]{0,200}\})?\"?(?: is |[=:] ?| )[1-9]",
            (
                r"(?:[Dd]ouble.[Bb]it|[Uu]ncorrectable|[Uu]ncorrected|DBE|volatile)[^\n]{0,40} (?:ECC|memory) "
                r"errors?[^\n]{0,40}(?:detected|found|encountered|occurred|reported)"
            ),
            r"ECC[_ ]UNCORRECTABLE[A-Z_]{0,40}\b(?! ?[:=] ?0\b)",
            r"[Dd]etected [1-9]\d{0,9} [^\n]{0,30}(?:uncorrectable|double.bit)[^\n]{0,30}(?:ECC|memory) errors?",
            r"[Rr]ow remap(?:ping)? fail(?:ed|ure)",
            r"[Vv]olatile[^\n]{0,40}[Uu]ncorrect\w{2,5}\b[^\n]{0,20}[:|=] {0,4}[1-9]",
            r"\bECC errors?\b[^\n]{0,60}(?:[Dd]ouble|[Uu]ncorrect|DBE|fatal)",
        ),
        "dcgm-health: GPU 3: Detected 2 volatile double-bit ECC error(s) in GPU 3",
    ),
    (
        "cuda-nvlink",
        _K.NVLINK_ERROR,
        "root",
        (
            _CUDA + r"(?:[Nn][Vv][Ll]ink|NVLINK)",
            r"uncorrectable NVLink error",
            r"NVLINK_UNCORRECTABLE",
            r"NvlinkUncorrectable",
        ),
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    (
        "nvswitch-fatal",
        _K.NVLINK_ERROR,
        "root",
        (r"SXid \([^)]{1,64}\): \d{1,9}, Fatal",),
        "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 22013, Fatal, Link 45 Minion Link DLREQ interrupt",
    ),
    (
        "nvlink-down",
        _K.NVLINK_ERROR,
        "root",
        (
            r"[Dd]etected (?:NVSwitch|NVLink|LWSwitch|LWLink)\b(?! non-?fatal)[^\n]{0,24}(?:fatal|failure)",
            r"[Ff]atal errors? (?:detected )?on NVSwitch",
            r"NVSWITCH_FATAL_ERROR",
            r"[Ff]ailed to configure all the available GPUs or NVSwitches",
            r"\bNV[Ll]ink\b[^\n]{0,40}\b(?:recovery error|failure detected|fabric failure)\b",
            r"\bNVRM: (?:GPU\d{1,2} )?knvlink\w{1,60}: [^\n]{0,60}(?:[Ff]ail|error)",
            (
                r"(?:[Ff]abric ?[Mm]anager|fabricmanager)[^\n]{0,120}(?:(?<![Nn]on-)fatal|NVLink[^\n]{0,40}(?:fail|down|error)|"
                r"[Ff]abric[^\n]{0,40}fail)"
            ),
            (
                r"\b[Nn][Vv][Ll](?:ink|INK)s?\b[^\n]{0,60}\b(?:(?:is|are) (?:currently )?(?:down|inactive)|went down|"
                r"fatal error|uncorrectable|training fail\w{0,4})"
            ),
            r"(?:fatal|uncorrectable)[^\n]{0,40}\b[Nn][Vv][Ll](?:ink|INK)\b[^\n]{0,20}error",
        ),
        "nvidia-fabricmanager[1207]: detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id",
    ),
    (
        "dma-refused",
        _K.INVALID_DMA_MAPPING,
        "root",
        (
            (
                r"arm-smmu[^\n]{0,80}(?:event 0x(?:0[2-9a]|1[0-3]) received|event: [FC]_[A-Z]|"
                r"[Uu]nhandled context fault|[Tt]ranslation fault)"
            ),
            r"AMD-Vi: Event logged \[(?:INVALID_DEVICE_REQUEST|ILLEGAL_DEV|INVALID_PPR)",
            (
                r"NVRM:[^\n]{0,60}(?:DMA address|dmaAllocMap|[Ii]ova[Mm]ap|"
                r"[Ii]ovaspace)[^\n]{0,60}(?:not in addressable|[Ff]ail|[Ee]rror|ERR_|can\'t)"
            ),
            r"returned from (?:osIova|nv_dma|dmaAlloc|iovaspace|memdescMapIommu)\w{0,40}\(",
            r"overflow 0x[^\n]{1,60} of DMA mask",
            r"dma_direct_\w{1,20}: overflow",
            r"(?:DMA|dma) map(?:ping)? (?:error|failure)\b",
            r"INVALID_DMA_MAPPING",
            r"dma_map\w{0,20} (?:failed|error)",
            r"VFIO_(?:IOMMU_)?MAP_DMA[^\n]{0,20}(?:[Ff]ail|error)",
            r"nvidia-(?:fs|peermem):[^\n]{0,60}(?:map|dma|DMA)[^\n]{0,40}(?:[Ff]ail|[Ee]rror)",
            r"NVRM:[^\n]{0,160}(?:DMA|dma) mapping",
            r"invalid DMA mapping",
            r"DMAR: \[DMA (?:Read|Write)",
            r"IO_PAGE_FAULT",
            r"[Ii][Oo][Mm][Mm][Uu][^\n]{0,60}(?:page fault|DMA fault|translation fault)",
            r"swiotlb[^\n]{0,80}(?:buffer is full|overflow)",
            r"DMA-API:[^\n]{0,120}(?:mapping error|not mapped|invalid)",
            r"(?:dma_map_\w{1,20}|DMA map(?:ping)?)[^\n]{0,40}fail",
            r"[Ff]ailed to (?:DMA )?map[^\n]{0,40}(?:DMA|dma)",
            r"NVRM:[^\n]{0,80}nv_(?:dma|get_p2p)[^\n]{0,80}(?:fail|error)",
            r"p2p_dma_map\w{0,20}[^\n]{0,40}(?:fail|error)",
        ),
        (
            "DMAR: [DMA Write NO_PASID] Request device [3b:00.0] fault addr 0x7f2c00000 [fault reason 0x05] PTE "
            "Write access is not set"
        ),
    ),
    (
        "cuda-dma",
        _K.INVALID_DMA_MAPPING,
        "root",
        (
            _CUDA + r"(?:DMA|mapping of buffer object failed)",
            r"cudaErrorMapBufferObjectFailed",
            r"CUDA_ERROR_MAP_FAILED",
        ),
        "RuntimeError: CUDA error: mapping of buffer object failed",
    ),
    (
        "off-the-bus",
        _K.GPU_LOST,
        "root",
        (r"(?:GPU has )?fallen off the bus",),
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    ),
    (
        "gpu-is-lost",
        _K.GPU_LOST,
        "root",
        (
            (
                r"\bGPU[- ](?:\d{1,2}|[0-9a-f]{4,12}[0-9a-f:.-]{0,40}) (?:is|was) (?:lost|missing|inaccessible|"
                r"not accessible)\b"
            ),
            r"no longer present[^\n]{0,40}GPU|GPU[^\n]{0,60}device no longer present",
            r"GPU is lost\b",
            r"Unable to determine the device handle for GPU[^\n]{0,80}(?:lost|Unknown Error|Not Found)",
            _CUDA + r"no CUDA-capable device",
            r"NVML_ERROR_GPU_IS_LOST",
            r"NVMLError_GpuIsLost",
            r"No CUDA GPUs are available",
            r"GPU[^\n]{0,60} (?:has disappeared|is no longer (?:detected|visible|present))",
            r"CUDA_ERROR_NO_DEVICE",
        ),
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
    ),
    (
        "driver-init",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            r"nvidia: probe of \S{1,20} failed with error",
            r"driver on your system is too old",
            r"could not select device driver \\?\"{1,2}(?:nvidia)?\\?\"? ?with capabilities: \[\[gpu",
            (
                r"NVRM:[^\n]{0,80}(?:_kgspLogXid119|GSP (?:task )?(?:exception|[Cc]rash|[Tt]imeout|halted)|"
                r"[Ww]atchdog: GPU is probably locked|requires reset)"
            ),
            r"\bGPU requires reset\b",
            (
                r"NVML_ERROR_(?:DRIVER_NOT_LOADED|RESET_REQUIRED|IRQ_ISSUE|CORRUPTED_INFOROM)|"
                r"NVMLError_(?:ResetRequired|DriverNotLoaded|LibRmVersionMismatch)"
            ),
            r"RIP: [^\n]{0,80}\[nvidia",
            r"GSP_(?:LOCKDOWN|CRASH)|GSP firmware (?:crash|hang|fail|halt)",
            r"RmInitAdapter failed",
            r"rm_init_adapter failed",
            r"Driver/library version mismatch",
            r"NVML_ERROR_LIB_RM_VERSION_MISMATCH",
            r"CUDA driver initialization failed",
            r"CUDA driver version is insufficient",
            r"Found no NVIDIA driver on your system",
            r"couldn't communicate with the NVIDIA driver",
            r"could not insert '?nvidia",
            r"nvidia-container-cli: [^\n]{0,60}(?:driver|driver rpc|nvml) (?:error|not)",
            r"(?:nvml|NVML)[^\n]{0,20}: (?:driver not loaded|Driver Not Loaded)",
            (
                r"NVRM:[^\n]{0,80}(?:_kgspRpcRecvPoll|GSP[^\n]{0,40}(?:timeout|timed out|failed)|GPU recovery|Timeout "
                r"waiting for RPC)"
            ),
            r"NVRM: API mismatch",
        ),
        "NVRM: GPU 0000:86:00.0: RmInitAdapter failed! (0x62:0x40:2477)",
    ),
    (
        "cuda-driver",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            r"cudaErrorDevicesUnavailable",
            (
                r"cudaError(?:SystemNotReady|SystemDriverMismatch|InsufficientDriver|InitializationError|"
                r"CompatNotSupportedOnDevice)\b"
            ),
            r"CUDA_ERROR_(?:NOT_INITIALIZED|DEINITIALIZED|SYSTEM_NOT_READY|SYSTEM_DRIVER_MISMATCH|UNKNOWN)\b",
            r"NVML_SUCCESS == \w{1,12} INTERNAL ASSERT FAILED",
            r"nvmlInit\w{0,8}(?:\(\))? failed|[Ff]ailed to init(?:ialize)? nvml",
            _CUDA
            + (
                r"(?:driver shutting down|initialization error|system not yet initialized|system has unsupported "
                r"display driver|driver version is insufficient|unknown error|forward compatibility was attempted)"
            ),
            r"CUDA unknown error - this may be due to",
        ),
        "RuntimeError: CUDA error: unknown error",
    ),
    (
        "cuda-init",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            (
                r"CUDA initialization: (?:Unexpected error|CUDA unknown error|CUDA driver initialization "
                r"failed)[^\n]{0,400}"
            ),
            r"cudaGetDeviceCount\(\)[^\n]{0,200}Error 80[0-9]",
            r"Failed to initialize NVML: (?!Insufficient)",
        ),
        ("UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
    ),
    (
        "pcie-fatal",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            r"DPC: containment event",
            r"AER: (?:device recovery failed|can't recover)",
            r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \((?:Fatal|Non-Fatal)\)",
            r"AER: Uncorrect(?:ed|able) \(Fatal\) error",
        ),
        "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    ),
    (
        "gpu-missing",
        _K.GPU_LOST,
        "root",
        (
            r"[Ee]xpected \d{1,2} GPUs?,? (?:but )?(?:found|got|detected|only|saw) ",
            r"gres/gpu:? count (?:reported lower|changed|too low|lower than)",
            (
                r"\b(?:lists?|sees|saw|finds|found|reports|shows|only|"
                r"has) \d{1,2} (?:\w{1,12} )?GPUs?\b[^\n]{0,20}\bexpect(?:ed|s|ing) \d{1,2}"
            ),
            r"nvidia\.com/gpu[^\n]{0,40}(?:dropped|decreased|went|changed) from \d{1,3} to \d",
        ),
        "prolog: expected 8 GPUs, found 7",
    ),
    (
        "nvlink-inactive",
        _K.NVLINK_ERROR,
        "root",
        (
            r"(?:CRC|FLIT|flit|[Rr]eplay|[Rr]ecovery) errors?\b[^\n]{0,40}\bNV[Ll]ink\b[^\n]{0,60}exceed",
            r"\bNV[Ll]ink (?:domain|partition|fabric)\b[^\n]{0,40}\b(?:degraded|unhealthy)\b",
            r"\bLink \d{1,2}: <?inactive>?",
            r"\bNV[Ll]ink\b[^\n]{0,40}\b[Ss]tate:? {0,2}(?:[Ii]nactive|INACTIVE|[Dd]own|DOWN)\b",
        ),
        "  Link 4: <inactive>",
    ),
    (
        "slot-empty",
        _K.GPU_LOST,
        "root",
        (
            r"nvidia [0-9a-f:.]{7,16}:[^\n]{0,80}(?:config space inaccessible|D3cold)",
            r"pciehp: Slot\([^)]{1,16}\): (?:Link Down|Card not present)",
            r"No devices were found",
        ),
        "pcieport 0000:40:01.1: pciehp: Slot(12): Card not present",
    ),
)
