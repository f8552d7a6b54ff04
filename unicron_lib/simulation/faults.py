"""Faults and traces of them: what befalls the machines, whoever manages them."""

from dataclasses import dataclass
from math import isfinite

from unicron_lib.domain.failures import DEFAULT_SEVERITY, ErrorKind, Severity
from unicron_lib.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something breaks on `node` (numbered from 0), `at_s` seconds after the start.

    `rank_share`, from 0.0 to below 1.0, says which of the node's GPUs it is. A fault of SEV1 takes the whole node out of use
    for `repair_s`; others need no repair.
    """

    at_s: float
    kind: ErrorKind
    node: int
    rank_share: float = 0.0
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        times = {"at_s": self.at_s, "repair_s": self.repair_s}
        wrong = [name for name, value in times.items() if not (isfinite(value) and value >= 0)]
        if wrong or self.node < 0 or not 0 <= self.rank_share < 1:
            raise UserError(f"a fault needs at_s, repair_s and node of 0 or more and a rank_share below 1, this is {self}")

    @property
    def severity(self) -> Severity:
        """That of its kind."""
        return DEFAULT_SEVERITY[self.kind]

    @property
    def takes_node(self) -> bool:
        """Whether its node is out of use until it is repaired."""
        return self.severity is Severity.SEV1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All faults of `duration_s` seconds in the order of time, and where they are known from."""

    name: str
    source: str
    duration_s: float
    faults: tuple[Fault, ...]

    def __post_init__(self) -> None:
        times = [fault.at_s for fault in self.faults]
        if not (isfinite(self.duration_s) and self.duration_s > 0):
            raise UserError(f"trace {self.name} lasts {self.duration_s} s, it must last a finite time above 0")
        if times != sorted(times) or (times and times[-1] > self.duration_s):
            raise UserError(
                f"the faults of trace {self.name} must be in the order of time and within its {self.duration_s:g} s"
            )
