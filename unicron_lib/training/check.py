"""One node's part in a meeting of the node check: tests its own devices, then exchanges known data with the others.

An agent starts it. It writes what it found as JSON to the file that UNICRON_CHECK_FILE names: once after the device tests,
again at the end, so that whoever it hangs with does not hide what its own devices said.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unicron_lib.training.device_tests import DeviceTest, Harm, devices, memory_fault, product_fault
from unicron_lib.training.groups import interface_towards, leave

GATHER_BYTES = 16 << 20
GATHERS = 5
HARM = "UNICRON_CHECK_HARM"
"""For tests: `memory`, `matmul`, `hang` (in the exchange), `crash`. A bad network is a proxy's part."""


def main() -> int:
    """Run the tests and write what they found; 0 also when something is wrong with the node."""
    if os.environ.get(HARM) == "crash":
        os.abort()
    torch.set_num_threads(1)
    found = _test_devices()
    _write(found | {"error": "it did not finish the exchange"})
    _write(found | _meet(os.environ))
    return 0


def _test_devices() -> dict[str, Any]:
    harm, faults, slowest_s = _harm(), list[dict[str, str]](), 0.0
    for device in devices():
        for test, run in (("memory", memory_fault), ("matmul", product_fault)):
            text, took_s = _outcome(run, device, harm)
            slowest_s = max(slowest_s, took_s)
            if text:
                faults.append({"device": str(device), "test": test, "text": text})
                break  # what else it says is worth nothing
    return {"exchanged": False, "gather_s": 0.0, "compute_s": slowest_s, "faults": faults, "error": ""}


def _outcome(run: DeviceTest, device: torch.device, harm: Harm) -> tuple[str, float]:
    """An error of the device is its fault; raises OutOfMemoryError, which is somebody else's."""
    try:
        return run(device, harm)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return _headline(error), 0.0


def _harm() -> Harm:
    return {
        "memory": Harm(memory=lambda chunk: chunk[-1].bitwise_xor_(1)),
        "matmul": Harm(product=lambda product: product[0, 0].add_(1.0)),
    }.get(os.environ.get(HARM, ""), Harm())


def _meet(env: Mapping[str, str]) -> dict[str, Any]:
    """Exchange data with the others; an error that keeps us from it is a finding."""
    try:
        _join(env)
        damaged, gather_s = _exchange(int(env["RANK"]), int(env["WORLD_SIZE"]))
        dist.barrier()  # nobody leaves while another one still receives
    except RuntimeError as error:
        return {"exchanged": False, "error": f"{type(error).__name__}: {_headline(error)}"}
    finally:
        leave()
    return {"exchanged": not damaged, "gather_s": gather_s, "error": damaged}


def _headline(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _join(env: Mapping[str, str]) -> None:
    limit = timedelta(seconds=float(env["UNICRON_CHECK_DEADLINE_S"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(env["MASTER_ADDR"]))
    dist.init_process_group(
        backend="nccl" if devices()[0].type == "cuda" else "gloo",
        store=TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=limit),
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        timeout=limit,
    )


def _exchange(rank: int, world_size: int) -> tuple[str, float]:
    """All-gathers on each device in turn; whose data came damaged, empty if nobody's, and the seconds on the slowest device.

    Of several all-gathers the quickest counts, and every byte of all of them.
    """
    expected = [_payload(sender) for sender in range(world_size)]
    slowest_s = 0.0
    if os.environ.get(HARM) == "hang":
        _hang()
    for device in devices():
        sent = expected[rank].to(device, copy=True)
        received = [torch.empty_like(sent) for _ in range(world_size)]
        damaged, times_s = set[int](), []
        for _ in range(GATHERS + 1):
            times_s.append(_timed_gather(received, sent))
            damaged |= {sender for sender, data in enumerate(received) if not torch.equal(data.cpu(), expected[sender])}
        slowest_s = max(slowest_s, min(times_s))
        if damaged:
            senders = ", ".join(map(str, sorted(damaged)))
            return f"what members {senders} of {world_size} sent arrived damaged", slowest_s
    return "", slowest_s


def _payload(sender: int) -> torch.Tensor:
    """What a member sends, known to all."""
    return torch.randint(0, 256, (GATHER_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(sender))


def _timed_gather(received: list[torch.Tensor], sent: torch.Tensor) -> float:
    """Of what was received before nothing is left; and nobody's time has in it what another one did before."""
    for data in received:
        data.zero_()
    dist.all_reduce(torch.zeros(1, device=sent.device))
    _finish(sent)
    began = time.perf_counter()
    dist.all_gather(received, sent)
    _finish(sent)
    return time.perf_counter() - began


def _finish(sent: torch.Tensor) -> None:
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)


def _hang() -> None:
    while True:
        time.sleep(60.0)


def _write(found: Mapping[str, object]) -> None:
    path = Path(os.environ["UNICRON_CHECK_FILE"])
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(found))
    temporary.rename(path)
