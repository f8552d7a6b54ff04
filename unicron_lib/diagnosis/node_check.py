"""What the meetings of a node check prove: which nodes are faulty, which are slow, and of which it cannot be told. Pure.

Who meets whom is said by `check_waves`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low

SLOW_FACTOR = 2.0
"""A meeting or a matrix product that takes this many times what is usual among the nodes of a check is slow."""
SLOW_FLOOR_S = 0.05
"""Differences below it say nothing about hardware."""
Group = tuple[str, ...]


class CheckVerdict(StrEnum):
    """What a check has found out about a node."""

    GOOD = "good"
    FAULTY = "faulty"
    STRAGGLER = "straggler"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """A device of a node failed a test of its own: `test` is `memory` or `matmul`."""

    device: str
    test: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one node tells of a meeting.

    `exchanged`: it received from every member what that member had sent. `gather_s` is what an all-gather took, `compute_s`
    a matrix product on its slowest device (0: not measured). `absent`: its agent did not take part, for the reason `error`.
    """

    node: str
    exchanged: bool = False
    gather_s: float = 0.0
    compute_s: float = 0.0
    faults: tuple[DeviceFault, ...] = ()
    error: str = ""
    absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The reports of one group; meetings of the same `turn` (from 0) ran at the same time."""

    turn: int
    reports: tuple[Report, ...]

    @property
    def nodes(self) -> Group:
        """Who met."""
        return tuple(report.node for report in self.reports)

    @property
    def counts(self) -> bool:
        """Whether it proves anything: somebody met somebody, and all came."""
        return len(self.reports) > 1 and not any(report.absent for report in self.reports)

    @property
    def passed(self) -> bool:
        """Whether all data arrived intact."""
        return self.counts and all(report.exchanged for report in self.reports)

    @property
    def pace_s(self) -> float:
        """Seconds of the all-gather for each peer that data came from."""
        return max(report.gather_s for report in self.reports) / max(1, len(self.reports) - 1)

    @property
    def error(self) -> str:
        """Why it failed, in the words of the first who says."""
        return next((report.error for report in self.reports if report.error), "data arrived damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict about a node, and why. `meetings` are the turns in which it took part.

    `suspected`: it is not known what ails it, but something went wrong wherever it was, while others have passed.
    """

    node: str
    verdict: CheckVerdict
    reason: str
    faults: tuple[DeviceFault, ...] = ()
    meetings: tuple[int, ...] = ()
    suspected: bool = False


def verdicts(nodes: Sequence[str], meetings: Sequence[Meeting]) -> dict[str, Finding]:
    """What `meetings` prove about each node.

    Good is who was in a meeting that passed at the usual pace; faulty or a straggler who failed or was slow a second time,
    with a good one; and a node's own devices speak for themselves.
    """
    evidence = _Evidence(meetings)
    return {name: evidence.finding(name) for name in nodes}


def absent_nodes(meetings: Iterable[Meeting]) -> dict[str, str]:
    """Nodes whose agents did not take part, and why."""
    return {report.node: report.error for meeting in meetings for report in meeting.reports if report.absent}


class _Evidence:
    """What all meetings say together. What is usual is what was measured first, so that a verdict never changes."""

    def __init__(self, meetings: Sequence[Meeting]) -> None:
        self._of = defaultdict[str, list[Meeting]](list)
        for meeting in meetings:
            for name in meeting.nodes:
                self._of[name].append(meeting)
        self._absent = absent_nodes(meetings)
        passed = [meeting for meeting in meetings if meeting.passed]
        self._usual_pace_s = _median(m.pace_s for m in passed if m.turn == passed[0].turn)
        first = [report for meeting in meetings if meeting.turn == 0 for report in meeting.reports]
        self._usual_compute_s = _median(report.compute_s for report in first if report.compute_s)
        self._faults = {
            name: tuple(dict.fromkeys(fault for report in self._reports(name) for fault in report.faults)) for name in self._of
        }
        self._good = {name for m in passed if not self._drags(m) for name in m.nodes if not self._own_word(name)}

    def finding(self, name: str) -> Finding:
        verdict, reason = self._judge(name)
        turns = tuple(meeting.turn for meeting in self._of[name])
        suspected = verdict is CheckVerdict.UNDETERMINED and bool(self._good) and any(it.counts for it in self._of[name])
        faults = self._faults.get(name, ())
        return Finding(node=name, verdict=verdict, reason=reason, faults=faults, meetings=turns, suspected=suspected)

    def _judge(self, name: str) -> tuple[CheckVerdict, str]:
        own = self._own_word(name)
        if own:
            return own
        if name in self._good:
            meeting = next(m for m in self._of[name] if m.passed and not self._drags(m))
            return CheckVerdict.GOOD, f"exchanged data with {_others(meeting, name)} intact, in {meeting.pace_s:.3g} s"
        again = [meeting for meeting in self._of[name] if meeting.counts][1:]
        proof = next((meeting for meeting in again if set(meeting.nodes) - {name} <= self._good), None)
        if proof is None:
            return CheckVerdict.UNDETERMINED, self._why_unknown(name)
        if proof.passed:
            lag = f"took {_times(proof.pace_s, self._usual_pace_s)}"
            return CheckVerdict.STRAGGLER, f"the exchange with {_others(proof, name)}, which is good, {lag}"
        return CheckVerdict.FAULTY, f"failed again, with {_others(proof, name)}, which is good: {proof.error}"

    def _own_word(self, name: str) -> tuple[CheckVerdict, str] | None:
        """What the node's own devices prove, whoever it met."""
        if faults := self._faults.get(name):
            return CheckVerdict.FAULTY, "; ".join(f"{fault.test} test on {fault.device}: {fault.text}" for fault in faults)
        took_s = min((report.compute_s for report in self._reports(name) if report.compute_s), default=0.0)
        if not _is_slow(took_s, self._usual_compute_s):
            return None
        return CheckVerdict.STRAGGLER, f"a matrix product took {_times(took_s, self._usual_compute_s)}"

    def _why_unknown(self, name: str) -> str:
        if name in self._absent:
            return f"took no part: {self._absent[name]}"
        counted = [meeting for meeting in self._of[name] if meeting.counts]
        if not counted:
            return "nobody was there to exchange data with: name an idle node beside it"
        last = counted[-1]
        how = "was slow" if last.passed else "failed"
        known = "it may be the fault of another" if self._good else "no two nodes passed together"
        return f"{how} with {_others(last, name)}, and {known}" + ("" if last.passed else f": {last.error}")

    def _drags(self, meeting: Meeting) -> bool:
        return _is_slow(meeting.pace_s, self._usual_pace_s)

    def _reports(self, name: str) -> Iterator[Report]:
        return (report for meeting in self._of[name] for report in meeting.reports if report.node == name)


def _is_slow(took_s: float, usual_s: float) -> bool:
    return 0.0 < SLOW_FACTOR * usual_s < took_s and took_s > usual_s + SLOW_FLOOR_S


def _times(took_s: float, usual_s: float) -> str:
    return f"{took_s:.3g} s, {took_s / usual_s:.1f} times as long as usual"


def _median(values: Iterable[float]) -> float:
    found = sorted(values)
    return median_low(found) if found else 0.0


def _others(meeting: Meeting, name: str) -> str:
    return " and ".join(other for other in meeting.nodes if other != name)
