"""Tests of one device whose right answer is known beforehand, to the bit: its memory, and its matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU_BYTES = 64 << 20
GPU_SHARE = 0.8
"""Of the GPU's free memory."""
CHUNK_BYTES = 1 << 30
PATTERNS = (0x5A5A5A5A5A5A5A5A, ~0x5A5A5A5A5A5A5A5A)
"""Between the two, every bit holds a 0 and a 1."""
CPU_SIZE, GPU_SIZE = 512, 8192
PRODUCTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """What the tests of this program spoil on purpose: a change of the memory, and of a product, between test and look."""

    memory: Callable[[torch.Tensor], object] = lambda _: None
    product: Callable[[torch.Tensor], object] = lambda _: None


DeviceTest = Callable[[torch.device, Harm], tuple[str, float]]
"""What is wrong with the device, and the seconds that its work took, 0 if that says nothing."""


def devices() -> list[torch.device]:
    """The node's GPUs, or its CPU."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def memory_fault(device: torch.device, harm: Harm) -> tuple[str, float]:
    """Write patterns all over the device's free memory and read them again.

    What was wrong, empty if nothing; no time is told, since it depends on what is free.
    """
    chunks = [torch.empty(size // 8, dtype=torch.int64, device=device) for size in _chunk_sizes(device)]
    for pattern in PATTERNS:
        for number, chunk in enumerate(chunks):
            chunk.fill_(pattern ^ number)  # so that a chunk that answers for another is seen
        harm.memory(chunks[-1])
        wrong = sum(int((chunk != pattern ^ number).sum()) for number, chunk in enumerate(chunks))
        if wrong:
            return f"{wrong} of {sum(chunk.numel() for chunk in chunks)} words read back otherwise than written", 0.0
    return "", 0.0


def _chunk_sizes(device: torch.device) -> list[int]:
    if device.type == "cpu":
        return [CPU_BYTES]
    free, _ = torch.cuda.mem_get_info(device)
    return [CHUNK_BYTES] * max(1, int(GPU_SHARE * free) // CHUNK_BYTES)


def product_fault(device: torch.device, harm: Harm) -> tuple[str, float]:
    """Multiply matrices of small whole numbers, whose product is exact whatever the order of the sums.

    What was wrong, empty if nothing, and the seconds of the fastest product.
    """
    size = CPU_SIZE if device.type == "cpu" else GPU_SIZE
    random = torch.Generator().manual_seed(size)
    left, right = (torch.randint(-3, 4, (size, size), generator=random).float().to(device) for _ in range(2))
    # Freivalds' check: a row with a wrong element shows, since the probe has no zero; all of it is exact in float64.
    probe = torch.randint(1, 1000, (size, 1), generator=random).double().to(device)
    expected = left.double() @ (right.double() @ probe)
    fastest_s = float("inf")
    for _ in range(PRODUCTS + 1):
        began = time.perf_counter()
        product = left @ right
        _finish(device)
        fastest_s = min(fastest_s, time.perf_counter() - began)
        harm.product(product)
        wrong = int((product.double() @ probe != expected).sum())
        if wrong:
            return f"{wrong} of {size} rows of a matrix product are wrong", fastest_s
    return "", fastest_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
