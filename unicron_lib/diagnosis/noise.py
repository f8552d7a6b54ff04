"""Lines that say nothing about a failure: start-up, progress, metrics, mere information. Words that keep a line all the same.

A line is noise if a pattern here knows it and none of the telling words is in it. The words win, but for a few harmless
phrases that contain one; what the caller wants (see `sifting`) wins over those, too.
"""

import re
from collections.abc import Iterable

from unicron_lib.diagnosis.wording import is_progress

PROGRESS = "iterations"
"""The noise that tells that a job goes on."""

TELLING = (
    *("error", "fail", "fatal", "abort", "exception", "traceback", "timeout", "timedout", "timeddout", "kill", "signal"),
    *("cancel", "preempt", "evict", "terminat", "refused", "reset", "unreachable", "denied", "nospace", "corrupt", "assert"),
    *("panic", "outofmemory", "oom", "blockedfor", "hang", "stuck", "stall", "xid", "nvrm", "ecc", "lost", "linkdown"),
    *("linkisdown", "wentdown", "carrier", "flap", "unhealthy", "invalid", "illegal", "unable", "cannot", "couldnot", "can't"),
    *("notfound", "missing", "mismatch", "segfault", "coredump", "uncorrect", "throttl", "slowdown", "expired", "retry"),
    *("retri", "closed", "broken", "disconnect", "exitcode", "exitstatus", "diverged", "notfinite", "non-finite", "warn"),
    *("critical", "overflow", "exceeded", "rejected", "unexpected", "stopping", "shuttingdown", "shutdown", "sigterm"),
    *("drain", "notresponding", "asyncevent", "portdown", "pagefault", "bug:", "lockup", "reboot", "nodefail", "usage:"),
)
"""Words that a line about a failure may have, in lower case and without blanks and digits: so lines are compared."""

_NOT_A_NUMBER = re.compile(r"(?<![a-z_])(?:nan|inf|infinity)(?![a-z_])(?! iterations)", re.IGNORECASE)

_HARMLESS = re.compile(
    r"\bNCCL INFO (?:NET/Plugin ?: |NCCL_\w{1,60} set by environment)|"
    r"^\s{0,4}\w{1,80} \.{3,80} (?:True|False|None|\[\]|-?\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,3})?)$|"
    r"\bop (?:report|name)\b|\[OKAY\]|FutureWarning: |DeprecationWarning: |UserWarning: The given NumPy array is not writ|"
    r"Setting OMP_NUM_THREADS|overriding default arguments for|TF-TRT Warning|TF_ENABLE_ONEDNN_OPTS|"
    r"Unable to register cu(?:FFT|DNN|BLAS) factory|computation_placer already registered|^\s{2,8}warnings\.warn\("
)
BINARY = "binary data"
_BINARY_SHARE = 0.2
"""From this share of characters that are no UTF-8 on, a line is no text."""
_BINARY_HEAD = 64
_PRINTABLE = bytes(ord("x") if 0x20 <= byte < 0x7F else 0 for byte in range(256))
_WORDS = b"x" * 10
"""So many printable characters in a row are words, even amid binary data: chance makes them once in 20 KB."""

_NCCL = (
    r"\bNCCL INFO (?:\[\w{1,40}\] )?(?:Channel |Trees? |Ring |Connected |Setting |Bootstrap|NET/|Using |comm |NCCL_|"
    r"NVLS|threadThresholds|\d{1,4} coll channels|P2P |CC |DMA-BUF|GPU Direct|ncclComm|cudaDriverVersion|NCCL version|MNNVL|"
    r"TUNER/|PROFILER/|Plugin |ROOT/|Symmetric|Launch |RAS |Check P2P)"
)
_BEGINS = (
    r"\s{0,4}\w[\w. ]{0,60}\.{3,80} \S|\s{0,2}>{1,3} |-{8,200}(?: [\w ]{1,40} -{8,200})?$|[=*#_~+-]{4,400}$|NCCL version \d|"
    r"using \w|building \w|\s?loading \w|time to initialize|ninja |NOTE: |Collecting \w|Requirement already satisfied|"
    r"JIT compile|(?:Deterministic|Performance Mode|Using QLoop): |deepspeed info|(?:torch|cuda|hip|nvcc) version|"
    r"\[(?:before the start of training step|after (?!training)[^\]\n]{1,60})\] datetime: |DeepSpeed "
)
_SYSTEM = (
    r"systemd\[\d{1,8}\]: (?:Start|Finish|Reach|Listen)|systemd-journald\[|CRON\[|link becomes ready|rsyslogd|dhclient|"
    r"nfs: server \S{1,128} OK|perf: interrupt took too long|open \(major=|SYN flooding|sshd\[\d{1,8}\]: Accepted"
)
_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("progress bars", ("it/s", "s/it", "B/s", "<"), r"\b\d{1,12}/\d{1,12} \[\d{1,4}:\d\d(?::\d\d)?<[^\]\n]{1,60}\]"),
    ("progress bars", ("%|",), r"\b\d{1,3}%\|[^|\n]{0,200}\|"),
    ("timers and metrics", ("...: (",), r"\s{0,8}(?:[\w-]{1,48} ){0,5}\.{3,80}: \(\d{1,12}\.\d{1,6}, \d{1,12}\.\d{1,6}\)"),
    ("timers and metrics", ("...: (",), r"\s{0,8}[\w-]{1,80} \.{3,80}: \(\d{1,12}\.\d{1,6}, \d{1,12}\.\d{1,6}\)"),
    (
        "timers and metrics",
        ("across ranks", "PULSE", "emory (MB)", "loss at iteration"),
        r"\(min, max\) time across ranks|\bPULSE: |[Mm]emory \(MB\) \||valid(?:ation)? loss at iteration",
    ),
    ("timers and metrics", (), r"[\w.:]{1,80}(?:\{[^}\n]{0,400}\})? -?\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?$"),
    ("NCCL's start-up", ("NCCL INFO",), _NCCL),
    ("start-up", (), _BEGINS),
    ("start-up", ("othing to be done for",), r"[Nn]othing to be done for"),
    ("start-up", ("op report", "op name", "[OKAY]", "[NO]"), r"\bop (?:report|name)\b|\[OKAY\]|\[NO\]"),
    ("start-up", ("successfully ",), r"successfully (?:loaded|saved) checkpoint"),
    (
        "mere information",
        ("INFO", "DEBUG", "TRACE", "info", "debug"),
        r"(?:^|[\s\[|=\"'(:,])(?:INFO|DEBUG|TRACE|info|debug)(?:[\s\]|\"':,)]|$)",
    ),
    ("mere information", ("[I", "[D"), r"\[[ID] [\w.]{1,80}:\d{1,6}\]|\[[ID]\d{3,4} \d\d:\d\d:\d\d"),
    ("mere information", (), r"[ID]\d{4} \d\d:\d\d:\d\d"),
    (
        "the system's routine",
        ("audit:", "entered ", "docker0"),
        r"\baudit: type=\d|entered \w{1,20} (?:state|mode)|docker0: port",
    ),
    (
        "the system's routine",
        ("systemd", "CRON", "becomes ready", "rsyslogd", "dhclient", "nfs: ", "perf: ", "open (maj", "SYN", "sshd"),
        _SYSTEM,
    ),
)
"""Name, plain texts of which a line must have one to be looked at more closely, pattern. Without such texts: how it begins."""
_NOISE = tuple((name, anchors, re.compile(pattern)) for name, anchors, pattern in _ROWS)
_LOOKED_AT = 600
_LABEL = re.compile(
    r"(?:\[?(?:default|rank|Rank )\d{1,6}\]?: ?|\d{1,5}: |[\w.-]{1,64}: |\d{4}-\d\d-\d\dT[\d:.,]{8,24}(?:Z|[+-]\d\d:?\d\d)? )"
)


def noise_of(text: str, squeezed: str, *, telling: bool) -> str | None:
    """Which noise a line is; None if it may tell of a failure.

    `squeezed` is the line in lower case, without blanks and digits, `telling` whether it has a telling word.
    """
    if not squeezed:
        return "blank lines"
    if squeezed.count("\ufffd") > _BINARY_SHARE * len(squeezed):
        return None if telling else BINARY
    text = text[:_LOOKED_AT].rstrip()
    bare = text[_label_end(text) :]
    if telling and not (_HARMLESS.search(text) or _HARMLESS.match(bare)):
        return None
    found = _noise(text, bare)
    if found and _NOT_A_NUMBER.search(text):
        return None
    return found or ("harmless warnings" if telling else None)


def is_binary(line: bytes) -> bool:
    """Whether there is nothing to read in a line as it stands; told quickly, since all such lines differ."""
    if line.isascii() or _WORDS in line.translate(_PRINTABLE):
        return False
    head = line[:_BINARY_HEAD].decode(errors="replace")
    return head.count("\ufffd") > _BINARY_SHARE * len(head)


def is_telling(squeezed: str) -> bool:
    """Whether a line has a word that lines about failures have."""
    return _has_one(TELLING, squeezed)


def _noise(text: str, bare: str) -> str | None:
    if is_progress(text):
        return PROGRESS
    for name, anchors, pattern in _NOISE:
        if anchors:
            if _has_one(anchors, text) and pattern.search(text):
                return name
        elif pattern.match(text) or pattern.match(bare):
            return name
    return None


def _has_one(words: Iterable[str], text: str) -> bool:
    for word in words:  # noqa: SIM110  twice as fast as any()
        if word in text:
            return True
    return False


def _label_end(text: str) -> int:
    label = _LABEL.match(text)
    return label.end() if label else 0
