"""NVIDIA's Xid codes: what each one says, what NVIDIA advises, what it means to a training job.

Codes, mnemonics and immediate actions are facts of NVIDIA's Xid catalog, the sheet of 172 codes that belongs to its "XID
Errors" documentation (https://docs.nvidia.com/deploy/xid-errors/). Meanings, roles and kinds are ours, after the severities
of the paper's section 3: an error that ends with a reset of the GPU or of the node is the node's, one that ends with a
restart of the application is the application's until it repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from unicron_lib.detection.gpu import GpuFaultKind


class Action(StrEnum):
    """What NVIDIA advises at once, named after the catalog's buckets."""

    NONE = "nothing"
    RESTART_APP = "restart the application"
    RESET_GPU = "reset the GPU"
    RESTART_VM = "restart the virtual machine"
    REBOOT = "restart the node"
    CONTACT_SUPPORT = "contact the support"
    CHECK_MECHANICALS = "check seating and connections"
    CHECK_UVM = "reset the GPU if it is shared by virtual machines"
    UPDATE_SOFTWARE = "update firmware and software"
    FOLLOW_XID_154 = "do what its text says"
    WORKFLOW_45 = "follow the other Xids, alone restart the fabric manager"
    WORKFLOW_48 = "reset the GPU, with Xid 63 or 64 drain it before"
    WORKFLOW_NVLINK = "evaluate the registers in its text"
    WORKFLOW_NVLINK5 = "evaluate the status in its text"
    UNSTATED = "not stated"


class Role(StrEnum):
    """What an Xid explains.

    A cause is reason enough to take the GPU away from jobs. What an application brings about is a symptom unless it repeats on
    the same GPU. A symptom follows from something else. A notice is for people.
    """

    CAUSE = "cause"
    APPLICATION = "application"
    SYMPTOM = "symptom"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One code of the driver; `kind` is None for a notice, `mnemonic` is NVIDIA's, empty if it is not in the catalog."""

    code: int
    mnemonic: str
    role: Role
    kind: GpuFaultKind | None
    action: Action
    meaning: str


_A = Action
_For = tuple[Role, GpuFaultKind | None]
_ECC: _For = (Role.CAUSE, "ecc_error")
_DRIVER: _For = (Role.CAUSE, "gpu_driver_error")
_LOST: _For = (Role.CAUSE, "gpu_lost")
_NVLINK: _For = (Role.CAUSE, "nvlink_error")
_ACCESS: _For = (Role.APPLICATION, "illegal_memory_access")
_PROGRAM: _For = (Role.APPLICATION, "cuda_error")
_ECHO: _For = (Role.SYMPTOM, "cuda_error")
_ECHO_ECC: _For = (Role.SYMPTOM, "ecc_error")
_ECHO_NVLINK: _For = (Role.SYMPTOM, "nvlink_error")
_NOTE: _For = (Role.NOTICE, None)

_ROWS: tuple[tuple[int, str, _For, Action, str], ...] = (
    (8, "ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT", _PROGRAM, _A.RESTART_APP, "a channel made no progress"),
    (11, "ROBUST_CHANNEL_GR_ERROR_MISSING_HW", _PROGRAM, _A.RESTART_APP, "a command stream was invalid"),
    (13, "ROBUST_CHANNEL_GR_EXCEPTION", _ACCESS, _A.RESTART_APP, "an exception, mostly an access out of bounds"),
    (14, "ROBUST_CHANNEL_FAKE_ERROR", _NOTE, _A.NONE, "an error made up for a test"),
    (25, "ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY", _PROGRAM, _A.RESTART_APP, "a command stream was invalid or illegal"),
    (31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", _ACCESS, _A.RESTART_APP, "the GPU's MMU met an illegal address"),
    (32, "ROBUST_CHANNEL_PBDMA_ERROR", _PROGRAM, _A.RESTART_APP, "the unit that fetches commands met a broken stream"),
    (37, "ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD", _NOTE, _A.NONE, "the firmware met an unknown method"),
    (38, "ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT", _NOTE, _A.NONE, "a watchdog of the firmware ran out"),
    (39, "ROBUST_CHANNEL_CE0_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 0 failed"),
    (40, "ROBUST_CHANNEL_CE1_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 1 failed"),
    (41, "ROBUST_CHANNEL_CE2_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 2 failed"),
    (43, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", _ACCESS, _A.NONE, "the program has to end, the GPU is fine"),
    (44, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", _NOTE, _A.NONE, "an engine met a fault during a context switch"),
    (45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", _ECHO, _A.WORKFLOW_45, "work was torn down, mostly after another error"),
    (46, "ROBUST_CHANNEL_GPU_TIMEOUT_ERROR", _DRIVER, _A.RESET_GPU, "the GPU stopped processing"),
    (48, "ROBUST_CHANNEL_GPU_ECC_DBE", _ECC, _A.WORKFLOW_48, "an uncorrectable (double bit) memory error"),
    (54, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", _NOTE, _A.CHECK_MECHANICALS, "auxiliary power is not connected"),
    (60, "ROBUST_CHANNEL_SEC2_ERROR", _PROGRAM, _A.RESTART_APP, "a video engine met an exception"),
    (62, "PMU_HALT_ERROR", _DRIVER, _A.RESET_GPU, "a micro-controller of the GPU halted"),
    (63, "INFOROM_DRAM_RETIREMENT_EVENT", _NOTE, _A.NONE, "a row of memory was put aside, effective after a reset"),
    (64, "INFOROM_DRAM_RETIREMENT_FAILURE", _ECC, _A.RESET_GPU, "a broken row of memory could not be put aside"),
    (66, "ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION", _NOTE, _A.NONE, "the driver accessed a register that it must not"),
    (67, "ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION", _NOTE, _A.NONE, "the driver broke a rule of the firmware"),
    (68, "ROBUST_CHANNEL_NVDEC0_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 0 failed"),
    (69, "ROBUST_CHANNEL_GR_CLASS_ERROR", _PROGRAM, _A.RESTART_APP, "an engine got an unknown class or method"),
    (70, "ROBUST_CHANNEL_CE3_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 3 failed"),
    (71, "ROBUST_CHANNEL_CE4_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 4 failed"),
    (72, "ROBUST_CHANNEL_CE5_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 5 failed"),
    (74, "NVLINK_ERROR", _NVLINK, _A.WORKFLOW_NVLINK, "an NVLink failed"),
    (75, "ROBUST_CHANNEL_CE6_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 6 failed"),
    (76, "ROBUST_CHANNEL_CE7_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 7 failed"),
    (77, "ROBUST_CHANNEL_CE8_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 8 failed"),
    (78, "VGPU_START_ERROR", _NOTE, _A.UPDATE_SOFTWARE, "a virtual GPU could not start"),
    (79, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", _LOST, _A.REBOOT, "the GPU has fallen off the bus"),
    (80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", _PROGRAM, _A.RESTART_APP, "a command stream arrived with a wrong checksum"),
    (82, "ROBUST_CHANNEL_NVJPG0_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 0 failed"),
    (83, "ROBUST_CHANNEL_NVDEC1_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 1 failed"),
    (84, "ROBUST_CHANNEL_NVDEC2_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 2 failed"),
    (85, "ROBUST_CHANNEL_CE9_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 9 failed"),
    (86, "ROBUST_CHANNEL_OFA0_ERROR", _PROGRAM, _A.RESTART_APP, "optical flow engine 0 failed"),
    (88, "ROBUST_CHANNEL_NVDEC3_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 3 failed"),
    (89, "ROBUST_CHANNEL_NVDEC4_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 4 failed"),
    (92, "EXCESSIVE_SBE_INTERRUPTS", _NOTE, _A.NONE, "many single-bit memory errors, all corrected"),
    (93, "INFOROM_ERASE_LIMIT_EXCEEDED", _NOTE, _A.NONE, "the InfoROM is protected against more writes"),
    (94, "ROBUST_CHANNEL_CONTAINED_ERROR", _ECC, _A.RESTART_APP, "an uncorrectable memory error, contained to one program"),
    (95, "ROBUST_CHANNEL_UNCONTAINED_ERROR", _ECC, _A.RESET_GPU, "an uncorrectable memory error that was not contained"),
    (96, "ROBUST_CHANNEL_NVDEC5_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 5 failed"),
    (97, "ROBUST_CHANNEL_NVDEC6_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 6 failed"),
    (98, "ROBUST_CHANNEL_NVDEC7_ERROR", _PROGRAM, _A.RESTART_APP, "video decoder 7 failed"),
    (99, "ROBUST_CHANNEL_NVJPG1_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 1 failed"),
    (100, "ROBUST_CHANNEL_NVJPG2_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 2 failed"),
    (101, "ROBUST_CHANNEL_NVJPG3_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 3 failed"),
    (102, "ROBUST_CHANNEL_NVJPG4_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 4 failed"),
    (103, "ROBUST_CHANNEL_NVJPG5_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 5 failed"),
    (104, "ROBUST_CHANNEL_NVJPG6_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 6 failed"),
    (105, "ROBUST_CHANNEL_NVJPG7_ERROR", _PROGRAM, _A.RESTART_APP, "JPEG engine 7 failed"),
    (106, "SMBPBI_TEST_MESSAGE", _NOTE, _A.NONE, "a test message"),
    (107, "SMBPBI_TEST_MESSAGE_SILENT", _NOTE, _A.NONE, "a silent test message"),
    (108, "NVLINK_REMOTE_TRANSLATION_ERROR", _NOTE, _A.NONE, "an NVLink peer could not translate an address"),
    (109, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", _DRIVER, _A.RESET_GPU, "a context switch took too long"),
    (110, "SEC_FAULT_ERROR", _DRIVER, _A.RESET_GPU, "a security fault of the hardware"),
    (119, "GSP_RPC_TIMEOUT", _DRIVER, _A.RESET_GPU, "the system processor (GSP) did not answer"),
    (120, "GSP_ERROR", _DRIVER, _A.RESET_GPU, "the system processor (GSP) failed"),
    (121, "C2C_ERROR", _NOTE, _A.NONE, "errors of the link to the CPU, all corrected"),
    (126, "ROBUST_CHANNEL_CE10_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 10 failed"),
    (127, "ROBUST_CHANNEL_CE11_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 11 failed"),
    (128, "ROBUST_CHANNEL_CE12_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 12 failed"),
    (129, "ROBUST_CHANNEL_CE13_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 13 failed"),
    (130, "ROBUST_CHANNEL_CE14_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 14 failed"),
    (131, "ROBUST_CHANNEL_CE15_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 15 failed"),
    (132, "ROBUST_CHANNEL_CE16_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 16 failed"),
    (133, "ROBUST_CHANNEL_CE17_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 17 failed"),
    (134, "ROBUST_CHANNEL_CE18_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 18 failed"),
    (135, "ROBUST_CHANNEL_CE19_ERROR", _PROGRAM, _A.RESTART_APP, "copy engine 19 failed"),
    (136, "ALI_TRAINING_FAIL", _NVLINK, _A.RESET_GPU, "an NVLink could not be trained"),
    (137, "NVLINK_PRIV_ERR", _ACCESS, _A.NONE, "an illegal access to another GPU's memory over NVLink"),
    (139, "ROBUST_CHANNEL_OFA1_ERROR", _PROGRAM, _A.RESTART_APP, "optical flow engine 1 failed"),
    (140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", _ECC, _A.RESET_GPU, "an uncorrectable memory error that escaped the driver"),
    (141, "ROBUST_CHANNEL_FAST_PATH_ERROR", _NOTE, _A.NONE, "a fault on CUDA's fast path"),
    (142, "ROBUST_CHANNEL_NVENC3_ERROR", _NOTE, _A.CONTACT_SUPPORT, "video encoder 3 failed"),
    (143, "GPU_INIT_ERROR", _DRIVER, _A.RESET_GPU, "the GPU could not be initialised"),
    (144, "NVLINK_SAW_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the SAW unit"),
    (145, "NVLINK_RLW_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the RLW unit"),
    (146, "NVLINK_TLW_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the TLW unit"),
    (147, "NVLINK_TREX_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the TREX unit"),
    (148, "NVLINK_NVLPW_CTRL_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the NVLPW control"),
    (149, "NVLINK_NETIR_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the network interface"),
    (150, "NVLINK_MSE_ERROR", _ECHO_NVLINK, _A.WORKFLOW_NVLINK5, "NVLink: error of the MSE unit"),
    (151, "ROBUST_CHANNEL_KEY_ROTATION_ERROR", _DRIVER, _A.RESTART_VM, "the rotation of encryption keys failed"),
    (152, "ROBUST_CHANNEL_DLA_SMMU_ERROR", _NOTE, _A.NONE, "a memory fault of the deep learning accelerator"),
    (153, "ROBUST_CHANNEL_DLA_TIMEOUT", _NOTE, _A.NONE, "the deep learning accelerator did not answer in time"),
    (154, "GPU_RECOVERY_ACTION_CHANGED", _NOTE, _A.FOLLOW_XID_154, "the driver changed what it takes to recover the GPU"),
    (155, "NVLINK_SW_DEFINED_ERROR", _ECHO_NVLINK, _A.RESET_GPU, "software took an NVLink down"),
    (156, "RESOURCE_RETIREMENT_EVENT", _ECHO_ECC, _A.RESET_GPU, "a part of the GPU was put aside, effective after a reset"),
    (157, "RESOURCE_RETIREMENT_FAILURE", _NOTE, _A.NONE, "a part of the GPU could not be put aside"),
    (158, "GPU_FATAL_TIMEOUT", _DRIVER, _A.RESET_GPU, "the GPU did not answer in time, for good"),
    (159, "ROBUST_CHANNEL_CHI_NON_DATA_ERROR", _NOTE, _A.CHECK_UVM, "a link to the CPU met an error without data"),
    (160, "CHANNEL_RETIREMENT_EVENT", _NOTE, _A.NONE, "a memory channel was put aside"),
    (161, "CHANNEL_RETIREMENT_FAILURE", _NOTE, _A.NONE, "a memory channel could not be put aside"),
    (162, "PSHC_REENGAGED", _NOTE, _A.UNSTATED, "power smoothing is on again"),
    (163, "PSHC_DISENGAGED", _NOTE, _A.UNSTATED, "power smoothing is off"),
    (164, "PSHC_LOW_LIFETIME", _NOTE, _A.UNSTATED, "the circuit of power smoothing is nearly worn out"),
    (165, "PSHC_ZERO_LIFETIME", _NOTE, _A.UNSTATED, "the circuit of power smoothing is worn out"),
    (166, "NVLINK_SECURE_CRYPTO_ERR", _NOTE, _A.UNSTATED, "traffic before the link was set up for encryption"),
    (167, "PCIE_FATAL_TIMEOUT", _DRIVER, _A.UNSTATED, "the PCI bus did not answer in time, for good"),
    (168, "REDUCED_GPU_MEMORY_CAPACITY", _NOTE, _A.UNSTATED, "the GPU has less memory than it should"),
    (169, "SEC2_HALT_ERROR", _DRIVER, _A.UNSTATED, "the security processor (SEC2) halted"),
    (170, "NVLINK_SECURE_OTHER", _NOTE, _A.UNSTATED, "an interrupt in confidential computing mode"),
    (171, "UNCORRECTABLE_DRAM_ERROR", _ECC, _A.UNSTATED, "an uncorrectable error of the GPU's DRAM"),
    (172, "UNCORRECTABLE_SRAM_ERROR", _ECC, _A.UNSTATED, "an uncorrectable error of the GPU's SRAM"),
)
_UNUSED: Mapping[int, str] = {
    1: "ROBUST_CHANNEL_FIFO_ERROR_FIFO_METHOD",
    2: "ROBUST_CHANNEL_FIFO_ERROR_SW_METHOD",
    3: "ROBUST_CHANNEL_FIFO_ERROR_UNK_METHOD",
    4: "ROBUST_CHANNEL_FIFO_ERROR_CHANNEL_BUSY",
    5: "ROBUST_CHANNEL_FIFO_ERROR_RUNOUT_OVERFLOW",
    6: "ROBUST_CHANNEL_FIFO_ERROR_PARSE_ERR",
    7: "ROBUST_CHANNEL_FIFO_ERROR_PTE_ERR",
    9: "ROBUST_CHANNEL_GR_ERROR_INSTANCE",
    10: "ROBUST_CHANNEL_GR_ERROR_SINGLE_STEP",
    12: "ROBUST_CHANNEL_GR_ERROR_SW_METHOD",
    15: "ROBUST_CHANNEL_SCANLINE_TIMEOUT",
    16: "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT",
    17: "ROBUST_CHANNEL_PARAMETER_ERROR",
    18: "ROBUST_CHANNEL_BUS_MASTER_TIMEOUT_ERROR",
    19: "ROBUST_CHANNEL_DISP_MISSED_NOTIFIER",
    20: "ROBUST_CHANNEL_MPEG_ERROR_SW_METHOD",
    21: "ROBUST_CHANNEL_ME_ERROR_SW_METHOD",
    22: "ROBUST_CHANNEL_VP_ERROR_SW_METHOD",
    23: "ROBUST_CHANNEL_RC_LOGGING_ENABLED",
    24: "ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT",
    26: "ROBUST_CHANNEL_FIFO_ERROR_FBISTATE_TIMEOUT",
    27: "ROBUST_CHANNEL_VP_ERROR",
    28: "ROBUST_CHANNEL_VP2_ERROR",
    29: "ROBUST_CHANNEL_BSP_ERROR",
    30: "ROBUST_CHANNEL_BAD_ADDR_ACCESS",
    33: "ROBUST_CHANNEL_SEC_ERROR",
    34: "ROBUST_CHANNEL_MSVLD_ERROR",
    35: "ROBUST_CHANNEL_MSPDEC_ERROR",
    36: "ROBUST_CHANNEL_MSPPP_ERROR",
    42: "ROBUST_CHANNEL_VIC_ERROR",
    47: "ROBUST_CHANNEL_NVENC0_ERROR",
    49: "SILENT_RUNNING_CONSTANT_LEVEL_SET_BY_REGISTRY",
    50: "SILENT_RUNNING_LEVEL_TRANSITION_DUE_TO_RC_ERROR",
    51: "SILENT_RUNNING_STRESS_TEST_FAILURE",
    52: "SILENT_RUNNING_LEVEL_TRANS_DUE_TO_TEMP_RISE",
    53: "SILENT_RUNNING_TEMP_REDUCED_CLOCKING",
    55: "SILENT_RUNNING_TEMPERATURE_READ_ERROR",
    56: "DISPLAY_CHANNEL_EXCEPTION",
    57: "FB_LINK_TRAINING_FAILURE_ERROR",
    58: "FB_MEMORY_ERROR",
    59: "PMU_ERROR",
    61: "PMU_BREAKPOINT",
    65: "ROBUST_CHANNEL_NVENC1_ERROR",
    73: "ROBUST_CHANNEL_NVENC2_ERROR",
    81: "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR",
    87: "NVTELEMETRY_DRIVER_REPORT",
    90: "LTC_ERROR",
    91: "RESERVED_XID",
    111: "BUNDLE_ERROR_EVENT",
    112: "DISP_SUPERVISOR_ERROR",
    113: "DP_LT_FAILURE",
    114: "HEAD_RG_UNDERFLOW",
    115: "CORE_CHANNEL_REGS",
    116: "WINDOW_CHANNEL_REGS",
    117: "CURSOR_CHANNEL_REGS",
    118: "HEAD_REGS",
    122: "SPI_PMU_RPC_READ_FAIL",
    123: "SPI_PMU_RPC_WRITE_FAIL",
    124: "SPI_PMU_RPC_ERASE_FAIL",
    125: "INFOROM_FS_ERROR",
    138: "ROBUST_CHANNEL_DLA_ERROR",
}
"""Codes that the catalog calls unused, each with the advice to contact the support: should one appear, people look at it."""

XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        code: Xid(code=code, mnemonic=mnemonic, role=role, kind=kind, action=action, meaning=meaning)
        for code, mnemonic, (role, kind), action, meaning in (
            *_ROWS,
            *((code, mnemonic, _NOTE, _A.CONTACT_SUPPORT, "not used by current drivers") for code, mnemonic in _UNUSED.items()),
        )
    }
)
