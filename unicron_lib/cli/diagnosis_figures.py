"""How fast logs are read and in how much memory, on a log made for it; each in a process of its own."""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BAR_MB_PER_S, BAR_MEMORY_MB = 100.0, 200.0
BINARY_MB, BINARY_MB_PER_S = 20, 20.0
"""Of random bytes so many megabytes are read at most, and what is asked: no two lines of them are alike."""
RANKS = 8
_CHUNK = 4096
_CALLS = {
    "compressed to a page": "from unicron_lib.diagnosis.compress import compress as read",
    "diagnosed": "from unicron_lib.diagnosis.diagnose import diagnose_files as read",
}
_CHILD = """
import json, pathlib, resource, sys, time
{call}
path = pathlib.Path(sys.argv[1])
began, cpu = time.perf_counter(), time.process_time()
found = read([path])
took = time.perf_counter() - began, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([*took, peak, str(getattr(found, "kind", "")), len(str(found).splitlines())]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to read a log of `size_mb`: seconds on the clock and of the processor, the most memory that the process held.

    `is_right` is false for a wrong diagnosis or for more than a page.
    """

    what: str
    size_mb: float
    wall_s: float
    cpu_s: float
    memory_mb: float
    is_right: bool
    bar_mb_per_s: float = BAR_MB_PER_S

    @property
    def mb_per_s(self) -> float:
        """Megabytes (1e6) in a second of the processor: what one core does."""
        return self.size_mb / self.cpu_s

    @property
    def ok(self) -> bool:
        """Whether both bars were held, with the right answer."""
        return self.mb_per_s >= self.bar_mb_per_s and self.memory_mb <= BAR_MEMORY_MB and self.is_right


def measure(size_mb: int) -> Iterator[Reading]:
    """Read a log of `size_mb` megabytes in each way, then one of random bytes. Raises CalledProcessError if a reader fails."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as place:
        path = Path(place) / "job.log"
        write_log(path, size_mb * 1_000_000)
        for what, call in _CALLS.items():
            yield _read(what, call, path, BAR_MB_PER_S)
        write_binary(path, min(size_mb, BINARY_MB) * 1_000_000)
        for what, call in _CALLS.items():
            yield _read(f"of random bytes {what}", call, path, BINARY_MB_PER_S)


def _read(what: str, call: str, path: Path, bar_mb_per_s: float) -> Reading:
    program = [sys.executable, "-c", _CHILD.format(call=call), str(path)]
    wall_s, cpu_s, peak, kind, num_lines = json.loads(subprocess.run(program, check=True, capture_output=True).stdout)
    is_right = kind == "ecc_error" if kind else num_lines <= 200
    size_mb = path.stat().st_size / 1e6
    return Reading(
        what=what,
        size_mb=size_mb,
        wall_s=wall_s,
        cpu_s=cpu_s,
        memory_mb=peak / 1e6,
        is_right=is_right,
        bar_mb_per_s=bar_mb_per_s,
    )


def write_log(path: Path, size_bytes: int) -> None:
    """A job of eight ranks in one log, as long as it takes, which an ECC error ends."""
    with path.open("w", encoding="utf-8") as out:
        step = 0
        while out.tell() < size_bytes:
            out.writelines(line for number in range(step, step + _CHUNK) for line in _step(number))
            step += _CHUNK
        out.writelines(_end())


def write_binary(path: Path, size_bytes: int) -> None:
    """What no terminal should show, and in its midst an ECC error."""
    chance = random.Random(1)  # noqa: S311  figures, no secrets
    with path.open("wb") as out:
        for number in range(0, size_bytes, 100_000):
            if 0 <= number - size_bytes // 2 < 100_000:
                out.write("".join(["\n", *_end()]).encode())
            out.write(chance.randbytes(100_000))


def _step(step: int) -> Iterator[str]:
    minute, second = divmod(step, 60)
    hour, minute = divmod(minute, 60)
    stamp = f"2025-03-{1 + hour // 24 % 28:02} {hour % 24:02}:{minute:02}:{second:02}"
    loss = 2 + 100 / (step + 50)
    yield (
        f" [{stamp}] iteration {step:8}/ 9000000 | consumed samples: {step * 256:12} | elapsed time per iteration (ms): "
        f"{900 + step % 97}.{step % 10} | learning rate: 1.5E-04 | global batch size:   256 | lm loss: {loss:.6E} | "
        f"loss scale: 1.0 | grad norm: 0.{step % 911:03} | skipped iterations: 0 | number of nan iterations:   0 |\n"
    )
    if step % 4 == 0:
        rank = step // 4 % RANKS
        where = f"gpu-1:{4100 + rank}:{4300 + rank} [{rank}]"
        yield f"{where} NCCL INFO Channel {step % 16:02}/0 : {rank}[{rank}] -> 1[1] via P2P/CUMEM\n"
    if step % 10 == 0:
        yield f"[rank{step % RANKS}]: {stamp} INFO loader: shard {step % 1000} of epoch {step // 9000} read in {step % 51} ms\n"
    if step % 500 == 0:
        yield f"WARNING:s3:{stamp}: upload of part {step % 64} was slow, retrying in 2 s (attempt 1/5)\n"


def _end() -> Iterator[str]:
    yield "[911.5] NVRM: Xid (PCI:0000:4e:00): 94, pid=4102, name=python3, Contained: SM (0x1). RST: No, D-RST: No\n"
    yield "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    for rank in range(RANKS):
        yield f"[rank{rank}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, Timeout(ms)=600000)\n"
