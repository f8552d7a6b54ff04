"""Holding back spares: GPUs that no job gets, so that the next node loss takes nothing from anybody."""


def held_back(spare_gpus: int, *, total_gpus: int, healthy_gpus: int) -> int:
    """GPUs to hold back now: of `spare_gpus` those that lost nodes have not used up yet."""
    lost = max(0, total_gpus - healthy_gpus)
    return min(max(0, spare_gpus - lost), healthy_gpus)
