"""How fast the simulator is on this machine."""

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from unicron_lib.simulation.accounting import of_outcome
from unicron_lib.simulation.engine import simulate
from unicron_lib.simulation.scenes import GENERATED, Asked, Scene, build

NUM_REPEATS = 3
BAR_MEMORY_MB = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One measurement: the least of a few, in seconds of the processor (`cpu_s`, held against `bar_s`) and on the clock.

    `virtual_s` is what was simulated of it, all policies together; `memory_mb` the most that this process has held so far.
    """

    what: str
    cpu_s: float
    wall_s: float
    bar_s: float
    virtual_s: float
    num_faults: int
    memory_mb: float

    @property
    def times_real(self) -> float:
        """How many times as fast as time itself."""
        return self.virtual_s / self.cpu_s if self.cpu_s else 0.0

    @property
    def ok(self) -> bool:
        """Whether time and memory keep within their bars."""
        return self.cpu_s <= self.bar_s and self.memory_mb <= BAR_MEMORY_MB


def measure(*, num_nodes: int = 12_500, days: float = 365.0) -> Iterator[Simulated]:
    """Trace-a on 128 GPUs, then a fleet of `num_nodes` nodes with 64 jobs for `days` days."""
    yield _measured("trace-a, 128 GPUs, 6 jobs, Unicron", Asked(trace="trace-a", policies=("unicron",)), 0.3)
    yield _measured("trace-a, 128 GPUs, 6 jobs, 5 policies", Asked(trace="trace-a", policies=("paper",)), 1.0)
    fleet = Asked(trace=GENERATED, jobs="fleet-64", policies=("unicron-fleet",), num_nodes=num_nodes, days=days)
    what = f"{8 * num_nodes} GPUs, 64 jobs, {days:g} days, Unicron as a fleet"
    yield _measured(what, fleet, 60.0, num_repeats=1)


def _measured(what: str, asked: Asked, bar_s: float, *, num_repeats: int = NUM_REPEATS) -> Simulated:
    scene = build(asked)
    runs = [_timed(scene) for _ in range(num_repeats)]
    return Simulated(
        what=what,
        cpu_s=min(cpu_s for cpu_s, _ in runs),
        wall_s=min(wall_s for _, wall_s in runs),
        bar_s=bar_s,
        virtual_s=len(scene.policies) * sum(trace.duration_s for trace in scene.traces.values()),
        num_faults=sum(len(trace.faults) for trace in scene.traces.values()),
        memory_mb=_most_held_mb(),
    )


def _timed(scene: Scene) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for trace in scene.traces.values():
        for policy in scene.policies:
            of_outcome(simulate(policy, trace, scene.cluster, scene.workload.jobs))
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def _most_held_mb() -> float:
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 1e6 if sys.platform == "darwin" else held / 1e3
