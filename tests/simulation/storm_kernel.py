"""Virtual time for storms: processes are generators that yield how long they sleep, and may be killed wherever they yield."""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

Work = Generator[float, None, None]


@dataclass(eq=False)
class Process:
    """A generator at work on a `host`, which does one thing at a time; with it end its children."""

    host: str
    work: Work
    children: list["Process"] = field(default_factory=list)
    is_over: bool = False


@dataclass
class HostClock:
    """A wall clock that was set wrong, and runs at its own speed."""

    kernel: "Kernel"
    offset_s: float = 0.0
    rate: float = 1.0

    def __call__(self) -> float:
        return 1e9 + self.kernel.now * self.rate + self.offset_s


class Kernel:
    """The heap of what is to happen; all chance comes from `rng`, so that a seed is a run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"storm {seed}")
        self.now = 0.0
        self.story: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None] | Process]] = []
        self._busy: list[str] = []
        self._counter = 0

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:9.3f} s  {what}")

    def later(self, delay_s: float, what: Callable[[], None] | Process) -> None:
        self._counter += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._counter, what))

    def start(self, host: str, work: Work, parent: Process | None = None) -> Process:
        process = Process(host, work)
        if parent:
            parent.children.append(process)
        self.later(0.0, process)
        return process

    def kill(self, process: Process) -> None:
        """Between two of its steps: what it has done holds, nothing more of it happens."""
        process.is_over = True
        if not process.work.gi_running:
            process.work.close()
        for child in process.children:
            self.kill(child)

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        self._pass(self.now + seconds)

    def hold_up(self, seconds: float) -> None:
        """What is being done takes that long, and other hosts go on meanwhile."""
        if len(self._busy) == 1:
            self._pass(self.now + seconds)

    def _pass(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, what = heapq.heappop(self._heap)
            if not isinstance(what, Process):
                what()
            elif what.host in self._busy:
                self.later(end - self.now + 0.001, what)
            else:
                self._go_on(what)
        self.now = end

    def _go_on(self, process: Process) -> None:
        if process.is_over:
            return
        self._busy.append(process.host)
        pause_s = next(process.work, None)
        self._busy.pop()
        if pause_s is None or process.is_over:
            process.is_over = True
            process.work.close()
        else:
            self.later(pause_s, process)


@dataclass
class Network:
    """Carries messages; in a storm they get lost, come late, in another order, or twice."""

    kernel: Kernel
    is_stormy: bool = True

    def carry(self, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        rng = self.kernel.rng
        if not self.is_stormy:
            self.kernel.later(0.001, deliver)
            return
        if rng.random() < 0.02:
            self.kernel.later(rng.uniform(0.0, 2.0), lost)
            return
        for _ in range(2 if rng.random() < 0.1 else 1):
            late_s = rng.uniform(0.5, 8.0) if rng.random() < 0.1 else rng.uniform(0.001, 0.05)
            self.kernel.later(late_s, deliver)
