"""Holding back spares: GPUs that no job gets, so that the next node loss takes nothing from anybody."""

import math


def standby_nodes(num_nodes: int, *, node_mtbf_s: float, repair_s: float, quantile: float = 0.99) -> int:
    """The number of nodes that are in repair at once, no more than which in `quantile` of the time.

    Nodes fail on their own, each about every `node_mtbf_s` seconds, and are back after `repair_s`: the number in repair is
    binomial. (Warm standbys sized by its P99: ByteRobust.)
    """
    share = repair_s / (node_mtbf_s + repair_s)
    if not 0 < share < 1:
        return num_nodes if share >= 1 else 0
    reached, down = 0.0, 0
    while down < num_nodes:
        reached += math.exp(_log_binomial(num_nodes, down, share))
        if reached >= quantile:
            break
        down += 1
    return down


def held_back(spare_gpus: int, *, total_gpus: int, healthy_gpus: int) -> int:
    """GPUs to hold back now: of `spare_gpus` those that lost nodes have not used up yet."""
    lost = max(0, total_gpus - healthy_gpus)
    return min(max(0, spare_gpus - lost), healthy_gpus)


def _log_binomial(trials: int, hits: int, share: float) -> float:
    choices = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return choices + hits * math.log(share) + (trials - hits) * math.log1p(-share)
