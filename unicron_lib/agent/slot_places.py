"""Where a node keeps states in host memory, and how its ranks are told."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from unicron_lib.domain.plans import Layout

MEMORY_DIR = "UNICRON_MEMORY_DIR"
"""The slots of the rank's job on its node."""
MEMORY_SLOT = "UNICRON_MEMORY_SLOT"
"""`GENERATION/ITERATION`: if a slot of that place is there, a rank without a state begins from it."""
MEMORY_LAYOUT = "UNICRON_MEMORY_LAYOUT"
"""`TP/PP`: the slots of that place were kept in this layout, which is not the rank's."""
MEMORY_KEEPS = "UNICRON_MEMORY_KEEPS"
"""`1`: the rank keeps what it has for all ranks of its node that have the same; `2`: also for another node."""
SHARED = Path("/dev/shm")  # noqa: S108 - private directories are made in it
PREFIX = "unicron-slots-"


def slot_directory(run_dir: Path, node: str) -> Path:
    """The slots of all jobs on a node: the same in every life of its agent, and nobody else's."""
    whose = hashlib.sha256(f"{run_dir}\0{node}".encode()).hexdigest()[:12]
    return SHARED / f"{PREFIX}{os.geteuid()}-{whose}"


def keepers(layout: Layout, ranks: Iterable[int]) -> dict[str, int]:
    """The parts of the state that ranks of a node have, each with the rank that keeps it there for all of them."""
    return {layout.part(rank): rank for rank in sorted(ranks, reverse=True)}
