"""Which layouts a job's state can be loaded into: nothing is stopped for a layout that it could not continue in.

A checkpoint whose optimizer state is sharded for data parallelism only can be loaded at any dp, but not at another tp or
pp. So can the state of live ranks, which has the layout that they run in.
"""

from enum import StrEnum

from unicron_lib.domain.plans import Layout


class CheckpointFormat(StrEnum):
    """How the optimizer state is sharded; Megatron's `distrib_optim_sharding_type`."""

    DP_RESHARDABLE = "dp_reshardable"
    FULLY_RESHARDABLE = "fully_reshardable"


def reachable(
    layout: Layout, checkpoint_format: CheckpointFormat, live_replica: Layout | None, *, saved: Layout | None = None
) -> str | None:
    """Why the job cannot go on in `layout`, and what would be needed; None if it can.

    `live_replica` is the layout of ranks that still hold the whole state, None if there are none. `saved` is the
    layout of the newest checkpoint, None if the job has none: then it begins anew, in any layout, unless it is live.
    """
    if live_replica is not None and _shards_alike(layout, live_replica):
        return None
    origin = saved or live_replica
    if origin is None or _shards_alike(layout, origin):
        return None
    if saved is not None and checkpoint_format is CheckpointFormat.FULLY_RESHARDABLE:
        return None
    wanted, has = f"tp={layout.tp} pp={layout.pp}", f"tp={origin.tp} pp={origin.pp}"
    return f"{wanted} is reachable only with a checkpoint that is {CheckpointFormat.FULLY_RESHARDABLE}: the state is of {has}"


def _shards_alike(one: Layout, other: Layout) -> bool:
    return (one.tp, one.pp) == (other.tp, other.pp)
