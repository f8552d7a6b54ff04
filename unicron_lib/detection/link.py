"""When is a network port's link broken? Pure: its ups and downs in, what to tell out."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from unicron_lib.detection.findings import Finding, HardwareFault, HardwareNotice

MAX_PORTS = 256
"""Ports that are remembered: a log full of made-up ones must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """A link flaps if it goes down `flaps` times in `window_s`, and fails if it is down for `down_s`. The numbers are ours."""

    flaps: int = 3
    window_s: float = 600.0
    down_s: float = 10.0


@dataclass(slots=True)
class _Port:
    """`told` says that its being down, or its flapping, was told as a fault."""

    name: str
    changed_at: float
    is_down: bool = False
    told: bool = False
    flaps: bool = False
    downs: deque[float] = field(default_factory=lambda: deque(maxlen=64))


class LinkWatch:
    """The memory of what each port did. `now` is any clock that never goes back, in seconds."""

    def __init__(self, rules: LinkRules | None = None) -> None:
        self.rules = rules or LinkRules()
        self._ports: dict[str, _Port] = {}

    def hear(self, name: str, now: float, *, up: bool) -> Iterator[Finding]:
        """Take in that a port's link went up or down: worth a notice each time, until it flaps, which is a fault."""
        port = self._ports.pop(name, None) or _Port(name, now)
        self._ports[name] = port  # the newest is last
        if len(self._ports) > MAX_PORTS:
            self._ports.pop(next(iter(self._ports)))
        if up is not port.is_down:
            return  # it was so before
        down_s = now - port.changed_at
        port.is_down, port.changed_at = not up, now
        yield from self._up(port, down_s) if up else self._down(port, now)

    def due(self, now: float) -> Iterator[Finding]:
        """What time alone brings about: a port that is down for too long, a flapping one that keeps quiet."""
        for port in self._ports.values():
            still_s = now - port.changed_at
            if port.is_down and not port.told and still_s > self.rules.down_s:
                port.told = True
                yield _fault(port, f"is down for {still_s:.1f} s (limit: {self.rules.down_s:g} s)")
            if port.flaps and not port.is_down and still_s > self.rules.window_s:
                port.flaps = False
                yield self._over(f"the link of port {port.name} has been up for {still_s:.0f} s")

    def _down(self, port: _Port, now: float) -> Iterator[Finding]:
        port.downs.append(now)
        if port.flaps:
            return
        times = sum(now - at <= self.rules.window_s for at in port.downs)
        yield HardwareNotice(code="link_down", text=f"the link of port {port.name} is down")
        if times >= self.rules.flaps:
            port.flaps = port.told = True
            yield _fault(port, f"went down {times} times within {self.rules.window_s:g} s (limit: {self.rules.flaps})")

    def _up(self, port: _Port, down_s: float) -> Iterator[Finding]:
        if port.flaps:
            return
        port.told = False
        yield self._over(f"the link of port {port.name} is up again after {down_s:.1f} s")

    def _over(self, text: str) -> Finding:
        down = [port.name for port in self._ports.values() if port.is_down or port.flaps]
        return HardwareNotice(code="link_down", text=f"{text}; not so {', '.join(down)}" if down else text, active=bool(down))


def _fault(port: _Port, what: str) -> Finding:
    return HardwareFault(kind="link_flapping", evidence=f"the link of port {port.name} {what}", count=max(1, len(port.downs)))
