"""Which Xids are faults, symptoms or notices, each told once however often the driver repeats it. Pure: time is an argument."""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType

from unicron_lib.detection.findings import Finding, HardwareFault, HardwareNotice
from unicron_lib.detection.gpu_names import GpuName
from unicron_lib.detection.nvlink_registers import role_of_nvlink_error
from unicron_lib.detection.xid_table import XIDS, Action, Role, Xid

MAX_SIGHTINGS = 1024
"""Pairs of GPU and code that are remembered: a log full of made-up ones must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidRules:
    """When an Xid is news, and when an application's fault is hardware's. The numbers are ours.

    The same Xid of the same GPU is told once until it was silent for `window_s`. Symptoms and notices are collected until
    none came for `settle_s`, at most for `collect_s`. A program's fault that the same GPU has `repeats` times within
    `repeat_window_s` is the GPU's, unless another GPU of the node repeats it too; sightings less than `burst_s` apart are one.
    A code that the table does not know is told with `unknown_action`.
    """

    window_s: float = 180.0
    settle_s: float = 0.5
    collect_s: float = 3.0
    burst_s: float = 10.0
    repeats: int = 3
    repeat_window_s: float = 3600.0
    unknown_action: Action = Action.CONTACT_SUPPORT

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(f"repeats is {self.repeats}: what a program does once may be the program's")
        if not 0 < self.repeat_window_s < float("inf"):
            raise ValueError(f"repeat_window_s is {self.repeat_window_s}, it must be a positive number of seconds")


class _Gravity(IntEnum):
    UNTOLD, NOTICE, SYMPTOM, FAULT = range(4)


_GRAVITY: Mapping[Role, _Gravity] = MappingProxyType(
    {
        Role.NOTICE: _Gravity.NOTICE,
        Role.SYMPTOM: _Gravity.SYMPTOM,
        Role.APPLICATION: _Gravity.SYMPTOM,
        Role.CAUSE: _Gravity.FAULT,
    }
)
_NONFATAL, _FATAL = re.compile(r"\b[Nn]on-?fatal\b"), re.compile(r"\bFatal\b")
_RECOVERY = re.compile(r"\((?:GPU Reset|Node Reboot) Required\)\s*$")
_NVLINK5 = range(144, 151)


def explain(code: int, text: str = "", *, unknown_action: Action = Action.CONTACT_SUPPORT) -> Xid:
    """What Xid `code` means, given the text that follows it; without the text, what needs it to be judged is no cause.

    The texts: 144 to 150 say whether they are fatal, 154 says what the GPU needs, 74 has registers. An unknown code is
    a notice.
    """
    xid = XIDS.get(code)
    if xid is None:
        return Xid(
            code=code, mnemonic="", role=Role.NOTICE, kind=None, action=unknown_action, meaning="not in NVIDIA's catalog"
        )
    if code in _NVLINK5 and _NONFATAL.search(text):
        return replace(xid, role=Role.NOTICE)
    if code in _NVLINK5 and _FATAL.search(text):
        return replace(xid, role=Role.CAUSE)
    if code == 154 and _RECOVERY.search(text):
        return replace(xid, role=Role.CAUSE, kind="gpu_driver_error")
    if code == 74:
        return replace(xid, role=role_of_nvlink_error(text))
    return xid


@dataclass(slots=True)
class _Sighting:
    """One code on one GPU: how often, when, and what was told of it. Times by the watch's clock."""

    gpu: GpuName
    code: int
    first_at: float
    last_at: float = float("-inf")
    stamp: str = ""
    text: str = ""
    count: int = 0
    told: _Gravity = _Gravity.UNTOLD
    waiting: _Gravity = _Gravity.UNTOLD
    bursts: deque[float] = field(default_factory=lambda: deque(maxlen=64))


class XidWatch:
    """The memory of what was seen. `now` is any clock that never goes back, in seconds."""

    def __init__(self, rules: XidRules | None = None) -> None:
        self.rules = rules or XidRules()
        self._seen: dict[int, list[_Sighting]] = {}

    def hear(self, gpu: GpuName, code: int, now: float, *, text: str = "", stamp: str = "") -> Iterator[Finding]:
        """Take in an Xid; a fault is told at once. With the `stamp` of its last sighting it is not a new occurrence."""
        seen = self._sighting(gpu, code, now)
        self._count(seen, now, text, stamp)
        gravity = self._gravity(seen, now)
        if gravity <= max(seen.told, seen.waiting):
            return
        if gravity is _Gravity.FAULT:
            yield self._tell(seen, gravity, now)
        else:
            seen.waiting = gravity
            seen.first_at = now

    def due(self, now: float) -> Iterator[Finding]:
        """The symptoms and notices that have been collected long enough."""
        for seen in [seen for group in self._seen.values() for seen in group if seen.waiting]:
            if now - seen.last_at >= self.rules.settle_s or now - seen.first_at >= self.rules.collect_s:
                yield self._tell(seen, seen.waiting, now)

    def noted(self, now: float) -> tuple[str, ...]:
        """The notices that hold: those that were told and not silent for the window since."""
        return tuple(
            f"Xid {seen.code} of {seen.gpu}"
            for group in self._seen.values()
            for seen in group
            if seen.told is _Gravity.NOTICE and now - seen.last_at < self.rules.window_s
        )

    def _sighting(self, gpu: GpuName, code: int, now: float) -> _Sighting:
        group = self._seen.setdefault(code, [])
        for seen in group:
            if seen.gpu.agrees_with(gpu) or seen.gpu == gpu:
                seen.gpu = gpu.with_more(seen.gpu)
                return seen
        if sum(map(len, self._seen.values())) >= MAX_SIGHTINGS:
            self._make_room()
            group = self._seen.setdefault(code, [])
        group.append(_Sighting(gpu=gpu, code=code, first_at=now))
        return group[-1]

    def _make_room(self) -> None:
        """Forget the half that was silent for longest."""
        everything = sorted((seen for group in self._seen.values() for seen in group), key=lambda seen: seen.last_at)
        self._seen = {}
        for seen in everything[len(everything) // 2 :]:
            self._seen.setdefault(seen.code, []).append(seen)

    def _count(self, seen: _Sighting, now: float, text: str, stamp: str) -> None:
        silent_s = now - seen.last_at
        known = bool(stamp) and stamp == seen.stamp
        if silent_s >= self.rules.window_s and not known:
            seen.count, seen.told, seen.text = 0, _Gravity.UNTOLD, ""
        if silent_s >= self.rules.burst_s and not known:
            seen.bursts.append(now)
        seen.count += 1
        seen.last_at, seen.stamp = now, stamp
        seen.text = text or seen.text

    def _gravity(self, seen: _Sighting, now: float) -> _Gravity:
        xid = self._explain(seen)
        if xid.role is Role.APPLICATION and self._is_the_gpus(seen, now):
            return _Gravity.FAULT
        return _GRAVITY[xid.role]

    def _is_the_gpus(self, seen: _Sighting, now: float) -> bool:
        """A program with a mistake meets it on many GPUs, a bad GPU makes good programs fail."""
        others = (other for other in self._seen[seen.code] if other is not seen)
        elsewhere = max((self._occurrences(other, now) for other in others), default=0)
        return self._occurrences(seen, now) >= self.rules.repeats > elsewhere + 1

    def _occurrences(self, seen: _Sighting, now: float) -> int:
        return sum(now - at <= self.rules.repeat_window_s for at in seen.bursts)

    def _explain(self, seen: _Sighting) -> Xid:
        return explain(seen.code, seen.text, unknown_action=self.rules.unknown_action)

    def _tell(self, seen: _Sighting, gravity: _Gravity, now: float) -> Finding:
        xid, gpu = self._explain(seen), seen.gpu
        seen.told, seen.waiting = gravity, _Gravity.UNTOLD
        evidence = self._evidence(seen, xid)
        if gravity is _Gravity.NOTICE:
            return HardwareNotice(code="xid", text=evidence)
        if gravity is _Gravity.FAULT and xid.role is Role.APPLICATION:
            evidence += f"; {self._rule(seen, now)}"
        symptom = gravity is _Gravity.SYMPTOM
        assert xid.kind, f"Xid {xid.code} is no notice, so it has a kind"
        return HardwareFault(
            kind=xid.kind, evidence=evidence, gpu=gpu.index, uuid=gpu.uuid, xid=xid.code, count=seen.count, symptom=symptom
        )

    def _evidence(self, seen: _Sighting, xid: Xid) -> str:
        often = f" {seen.count} times" if seen.count > 1 else ""
        said = f": {seen.text}" if seen.text else ""
        return f"{seen.gpu} reports Xid {xid.code}{often}, {xid.meaning}{said} (NVIDIA's advice: {xid.action})"

    def _rule(self, seen: _Sighting, now: float) -> str:
        rules, times = self.rules, self._occurrences(seen, now)
        return (
            f"it happened {times} times within {rules.repeat_window_s:g} s on this GPU only (limit: {rules.repeats}): "
            "no longer taken for the application's fault"
        )
