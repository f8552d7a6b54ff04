"""Under which keys a job's checkpoints lie in the store, and what a key tells."""

import re

from unicron_lib.checkpointing.manifest import LARGEST

INVERTED = re.compile(r"/(?:manifests/[0-9]{10}-|fences/)([0-9]{10})(?:-closing)?\.json$")
FOLDER = re.compile(r"jobs/[^/]+/shards/i(\d+)-g(\d+)-")


def folder_of(root: str, iteration: int, generation: int, save: str) -> str:
    """Where the shards of one save are."""
    return f"{root}/shards/i{iteration:010d}-g{generation}-{save}"


def sidecar_of(key: str) -> str:
    """Where the description of a shard is."""
    return key.removesuffix(".safetensors") + ".json"


def place_of(key: str) -> tuple[int, int] | None:
    """Iteration and generation of the save that a shard's key belongs to, None if it is no such key."""
    match = FOLDER.match(key)
    return (int(match[1]), int(match[2])) if match else None


def generation_of(key: str) -> int | None:
    """Who writes under a key of shards, manifests or fences, None if that cannot be told."""
    if place := place_of(key):
        return place[1]
    inverted = INVERTED.search(key)
    return LARGEST - int(inverted[1]) if inverted else None
