"""The rules of diagnosis: what each kind of failure asks for, how much it explains, and which lines tell of it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from unicron_lib.detection.xid import explain
from unicron_lib.detection.xid_table import Role as XidRole
from unicron_lib.diagnosis import (
    rule_table_endings,
    rule_table_hardware,
    rule_table_hosts,
    rule_table_network,
    rule_table_software,
)
from unicron_lib.diagnosis.findings import Role, Rule, Source
from unicron_lib.diagnosis.patterns import needles
from unicron_lib.diagnosis.wording import is_harmless
from unicron_lib.domain.failures import DEFAULT_SEVERITY, ErrorKind

_K = ErrorKind
HARDWARE, CAUSE, VAGUE, LINK, ECHO, STUCK, FOLLOWS = range(7)
"""How much a sighting explains, best first: of one incident, what stands further left is the cause of what follows."""

_FACTS: Mapping[ErrorKind, tuple[Source, bool, int, str]] = {
    _K.ECC_ERROR: (
        "infrastructure",
        True,
        HARDWARE,
        "take the GPU out of service, reset it, restart from the newest checkpoint",
    ),
    _K.NVLINK_ERROR: ("infrastructure", True, HARDWARE, "take the node out of service, check its NVLinks, restart elsewhere"),
    _K.GPU_LOST: ("infrastructure", True, HARDWARE, "take the node out of service, restart it, check the GPU's seat and power"),
    _K.GPU_DRIVER_ERROR: ("infrastructure", True, HARDWARE, "take the node out of service, reset its GPUs or restart it"),
    _K.INVALID_DMA_MAPPING: ("infrastructure", True, HARDWARE, "take the node out of service, check IOMMU settings and driver"),
    _K.NODE_LOST: ("infrastructure", True, HARDWARE, "restart on other nodes from the newest checkpoint"),
    _K.OUT_OF_MEMORY: ("unknown", False, CAUSE, "use less memory: a smaller micro-batch, recomputation, fewer workers"),
    _K.ILLEGAL_MEMORY_ACCESS: ("unknown", True, CAUSE, "restart; if it comes back on one GPU test that GPU, else the kernels"),
    _K.CUDA_ERROR: ("unknown", True, VAGUE, "restart; if it comes back on one GPU test that GPU, else the program"),
    _K.DATALOADER_ERROR: ("unknown", True, CAUSE, "restart; check the workers' memory and /dev/shm, use fewer workers"),
    _K.LOSS_ANOMALY: ("unknown", True, CAUSE, "go back to an earlier healthy checkpoint and skip the batches that did it"),
    _K.STORAGE_ERROR: ("infrastructure", True, CAUSE, "check store, credentials and space, then restart"),
    _K.USER_ERROR: ("user", False, CAUSE, "mend program, configuration or data: a restart would fail the same way"),
    _K.PREEMPTED: ("infrastructure", True, CAUSE, "nothing is broken: go on where there is room"),
    _K.LINK_FLAPPING: ("infrastructure", True, LINK, "restart; check cable and port if it comes back"),
    _K.NCCL_REMOTE_ERROR: ("infrastructure", True, ECHO, "find out why the peer went away; restart"),
    _K.CONNECTION_REFUSED: ("infrastructure", True, ECHO, "check that the peer runs and its port can be reached; restart"),
    _K.CONNECTION_RESET: ("infrastructure", True, ECHO, "find out why the peer went away; restart"),
    _K.NETWORK_ERROR: ("infrastructure", True, ECHO, "check network and name service between the nodes; restart"),
    _K.NCCL_TIMEOUT: (
        "unknown",
        True,
        STUCK,
        "find the rank that did not join the collective; check the nodes in pairs; restart",
    ),
    _K.TASK_HANG: ("unknown", True, STUCK, "find out what the process waits for; restart"),
    _K.PROCESS_EXIT: ("unknown", True, FOLLOWS, "look at the first rank's own log"),
}
_ELSE: tuple[Source, bool, int, str] = ("unknown", True, VAGUE, "look at the evidence")

_WEIGHTS: Mapping[str, int] = {
    "cuda-assert": CAUSE,
    "cuda-init": CAUSE,
    "host-oom": HARDWARE,
    "cuda-driver": VAGUE,
    "pcie-fatal": VAGUE,
    "slot-empty": VAGUE,
    "gpu-missing": VAGUE,
    "nvlink-inactive": VAGUE,
    "store-gone": STUCK,
    "nfs-silent": VAGUE,
    "host-memory": VAGUE,
    "told-to-stop": ECHO,
    "job-cancelled": ECHO,
    "nccl-system": STUCK,
    "nccl-cuda": STUCK,
}
"""Rules whose lines explain more or less than their kind does."""
_USERS = frozenset({"cuda-assert", "gpu-memory"})
"""Rules that tell of the program, though their kind can be anybody's fault."""
_FOR_PEOPLE: Mapping[str, str] = {
    "host-oom": "the node ran out of memory: use fewer dataloader workers or less pinned memory, or ask for more",
    "cuda-assert": "an index was out of range: check labels, token ids and vocabulary size",
    "worker-killed": "restart; check the node's memory and /dev/shm, use fewer workers",
    "disk": "make room or mend the mount, then restart",
}
_MAY_BE_MILD = frozenset({_K.PREEMPTED, _K.LOSS_ANOMALY, _K.LINK_FLAPPING, _K.TASK_HANG, _K.NODE_LOST, _K.PROCESS_EXIT})
"""Kinds that are told with the level INFO too."""
CUT = "cut-traceback"
"""The name of the rule of tracebacks that do not tell what was raised."""
HINTS = frozenset({CUT, rule_table_endings.NAMED})
"""Names of rules which tell that something is wrong, but not that a process ended."""
TAUGHT = "taught-"
"""How the names of rules begin that operators confirmed: they outdo ours."""
WAITING = frozenset({"nfs-silent"})
"""Rules of what is waited for until a line tells that it is over: to try again is no cure."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A rule ready to be used."""

    rule: Rule
    search: re.Pattern[str]
    needles: frozenset[str]


def rule_of(name: str, kind: ErrorKind, role: Role = "root", pattern: str = "", example: str = "") -> Rule:
    """A rule with what is known of its kind."""
    source, recoverable, _, mitigation = _FACTS.get(kind, _ELSE)
    return Rule(
        name=name,
        kind=kind,
        role=role,
        source="user" if name in _USERS else source,
        recoverable=recoverable or name == "host-oom",
        severity=DEFAULT_SEVERITY.get(kind) if role != "advice" else None,
        pattern=pattern,
        mitigation=_FOR_PEOPLE.get(name, mitigation),
        example=example,
    )


def weight_of(rule: Rule) -> int:
    """How much a line of this rule explains; what is no root explains nothing."""
    if rule.role != "root":
        return FOLLOWS
    return _WEIGHTS.get(rule.name, _FACTS.get(rule.kind, _ELSE)[2])


def may_be_mild(rule: Rule) -> bool:
    """Whether programs tell of it as mere information too."""
    return rule.kind in _MAY_BE_MILD


def _all() -> Iterator[Rule]:
    tables = (rule_table_hardware, rule_table_hosts, rule_table_software, rule_table_endings, rule_table_network)
    for name, kind, role, alternatives, example in (row for table in tables for row in table.ROWS):
        yield rule_of(name, kind, role, "|".join(alternatives), example)


RULES: tuple[Rule, ...] = tuple(_all())
"""All of ours, Xids and Python's exceptions aside: those have tables of their own in `detection`."""


@cache
def compiled(rule: Rule) -> Compiled:
    """The rule ready to be used. Raises re.error for a pattern that is none."""
    return Compiled(rule, re.compile(rule.pattern), needles(rule.pattern))


class RuleSet:
    """Rules that are tried on lines, quickly: most lines contain none of the plain texts that the rules need."""

    def __init__(self, rules: Iterable[Rule] = RULES) -> None:
        self._compiled = [compiled(rule) for rule in rules]
        self._by_needle: dict[str, list[int]] = {}
        self._always: list[int] = []
        for place, it in enumerate(self._compiled):
            if not it.needles or not all(map(str.isascii, it.needles)):
                self._always.append(place)
                continue
            for needle in it.needles:
                self._by_needle.setdefault(needle, []).append(place)

    def matches(self, text: str) -> list[tuple[Rule, int]]:
        """The rules that are found in a line, and where in it, in the order of the table."""
        # a search in a text of single bytes is many times as fast
        plain = text if text.isascii() else text.encode("ascii", "replace").decode()
        places = {place for needle, those in self._by_needle.items() if needle in plain for place in those}
        found = (self._compiled[place] for place in sorted(places.union(self._always)))
        return [(it.rule, hit.start()) for it in found if (hit := it.search.search(text))]


_XID_NEEDLES = ("Xid", "XID", "xid")
_XID = re.compile(
    r"(?:NVRM:\s{0,4}Xid \([^)]{1,64}\): |"
    r"\b(?:DCGM_FI_DEV_)?(?:XID|Xid|xid)(?:[ _]?(?i:critical))?(?:[ _]?(?i:errors?|event|code|number))?"
    r"(?:\{[^}\n]{0,400}\})?[\"']?(?: is | of |[ :=#]{1,2}))(?P<code>\d{1,4})\b(?P<text>.*)"
)
"""How the driver, and those who watch it, report an Xid."""
_OF_OLDER_DRIVERS = frozenset({12, 18, 26, 30, 33, 57, 58, 59, 61, 122, 123, 124, 125})
"""Xids that NVIDIA's catalog calls unused and its older table blames on hardware or driver: better than no cause at all."""
_EARLIER = re.compile(r"caused by previous Xid (\d{1,4})\b")
_XID_ROLES: Mapping[XidRole, Role] = {
    XidRole.CAUSE: "root",
    XidRole.APPLICATION: "root",
    XidRole.SYMPTOM: "cascade",
    XidRole.NOTICE: "advice",
}


def xid_in(text: str) -> tuple[Rule, int] | None:
    """What the Xid that a line reports tells of, and how much it explains; None if it reports none."""
    found = _XID.search(text) if any(it in text for it in _XID_NEEDLES) else None
    if found and not found[0].startswith("NVRM") and is_harmless(text):
        return None
    return _rule_of_xid(int(found["code"]), found["text"]) if found else None


def _rule_of_xid(code: int, text: str) -> tuple[Rule, int]:
    """The rule of an Xid, and how much it explains: what a program brings about less than what its own words tell.

    One that names the Xid it follows from stands for that.
    """
    if earlier := _EARLIER.search(text):
        xid = explain(int(earlier[1]))
        return rule_of(f"xid-{xid.code}", ErrorKind(xid.kind) if xid.kind else ErrorKind.GPU_DRIVER_ERROR, "root"), VAGUE
    if code in _OF_OLDER_DRIVERS:
        return rule_of(f"xid-{code}", ErrorKind.GPU_DRIVER_ERROR), VAGUE
    xid = explain(code, text)
    kind = ErrorKind(xid.kind) if xid.kind else ErrorKind.OTHER
    rule = rule_of(f"xid-{code}", kind, _XID_ROLES[xid.role])
    return rule, VAGUE if xid.role is XidRole.APPLICATION else weight_of(rule)
