"""What a person should know of a GPU although it is no fault: heat, throttling, what the driver asks for. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from unicron_lib.detection.gpu import GpuReading

RECOVERY_ACTIONS = MappingProxyType(
    {
        1: "a reset of the GPU",
        2: "a reboot of the node",
        3: "no new peer-to-peer traffic",
        4: "no new peer-to-peer traffic, then a reset of the GPU",
        5: "a recovery of the IMEX domain",
        6: "a reset of the GPU's PCIe bus",
        7: "a reboot of the system",
    }
)
"""What NVML's recovery action asks for; 0 is nothing."""

SLOWED_BY = MappingProxyType(
    {
        "hw_power_brake_slowdown": "the power brake",
        "hw_thermal_slowdown": "heat",
        "sw_thermal_slowdown": "heat",
        "hw_slowdown": "the hardware itself",
    }
)
"""The reasons for lower clocks that somebody has to look after. A power cap is how a GPU under load usually works."""

PATIENCE = MappingProxyType({"gpu_throttled": (3, 3), "gpu_hot": (3, 3), "gpu_blind": (1, 2)})
"""Looks in a row until something is told, and until it is told to be over; 1 unless it is named here. Ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """How it is with `who` as regards `code`: `what` is wrong, nothing if it is empty. `detail` is only for the reader."""

    code: str
    who: str
    what: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNotice:
    """Something to know, or, not `active`, that it is over."""

    code: str
    text: str
    active: bool


def signs(readings: Iterable[GpuReading]) -> Iterator[Sign]:
    """What the readings tell; nothing about what could not be read."""
    for gpu in readings:
        for code, rule in RULES.items():
            told = rule(gpu)
            if told is not None:
                yield Sign(code=code, who=f"GPU {gpu.index}", what=told[0], detail=told[1])


Told = tuple[str, str] | None
_FINE = ("", "")


def _blind(gpu: GpuReading) -> Told:
    return ("cannot be looked at", f"NVML error {gpu.error_code}") if gpu.is_blind else _FINE


def _throttled(gpu: GpuReading) -> Told:
    if gpu.throttle_reasons is None:
        return None
    causes = dict.fromkeys(cause for reason, cause in SLOWED_BY.items() if reason in gpu.throttle_reasons)
    return ("is slowed down", " and ".join(causes)) if causes else _FINE


def _hot(gpu: GpuReading) -> Told:
    if gpu.temperature_c is None or gpu.temperature_limit_c is None:
        return None
    hot = gpu.temperature_c >= gpu.temperature_limit_c
    return ("is too hot", f"{gpu.temperature_c} °C, allowed are {gpu.temperature_limit_c} °C") if hot else _FINE


def _remap_pending(gpu: GpuReading) -> Told:
    if gpu.row_remap_pending is None:
        return None
    return ("replaces a broken row of its memory at its next reset", "") if gpu.row_remap_pending else _FINE


def _recovery_action(gpu: GpuReading) -> Told:
    if gpu.recovery_action is None:
        return None
    unknown = "a recovery that this version does not know"
    wanted = RECOVERY_ACTIONS.get(gpu.recovery_action, unknown)
    return (f"needs {wanted}", f"recovery action {gpu.recovery_action}") if gpu.recovery_action else _FINE


RULES: MappingProxyType[str, Callable[[GpuReading], Told]] = MappingProxyType(
    {
        "gpu_blind": _blind,
        "gpu_throttled": _throttled,
        "gpu_hot": _hot,
        "row_remap_pending": _remap_pending,
        "gpu_recovery_action": _recovery_action,
    }
)
"""By the code of the notice: what is to be known of a GPU and its detail; None if nobody can tell."""


@dataclass(slots=True, kw_only=True)
class _State:
    """What is held true, and for how many looks in a row something else was seen."""

    held: str = ""
    detail: str = ""
    against: int = 0

    def see(self, sign: Sign) -> None:
        if sign.what == self.held:
            self.against = 0
            return
        self.against += 1
        until, over = PATIENCE.get(sign.code, (1, 1))
        if self.against >= (until if sign.what else over):
            self.held, self.detail, self.against = sign.what, sign.detail, 0


class NoticeBoard:
    """One notice a code, whoever it is about: told again when it concerns more, over when it concerns nobody any more."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, _State]] = {}
        self._told: dict[str, set[tuple[str, str]]] = {}
        self._life = ""

    def news(self, seen: Iterable[Sign], *, life: str) -> tuple[GpuNotice, ...]:
        """What is to be told after this look; a new `life` of the agent tells again what still holds."""
        if life != self._life:
            self._life, self._told = life, {}
        for sign in seen:
            self._states.setdefault(sign.code, {}).setdefault(sign.who, _State()).see(sign)
        return tuple(notice for code in self._states if (notice := self._notice(code)))

    def _notice(self, code: str) -> GpuNotice | None:
        holding = {who: state for who, state in self._states[code].items() if state.held}
        holds, told = {(who, state.held) for who, state in holding.items()}, self._told.get(code, set())
        if holds and not holds <= told:
            self._told[code] = holds
            return GpuNotice(code=code, text="; ".join(_sentence(who, state) for who, state in holding.items()), active=True)
        if told and not holds:
            del self._told[code]
            whom = ", ".join(sorted(who for who, _ in told))
            return GpuNotice(code=code, text=f"it is over: {whom}", active=False)
        return None


def _sentence(who: str, state: _State) -> str:
    return f"{who} {state.held}" + (f" ({state.detail})" if state.detail else "")
