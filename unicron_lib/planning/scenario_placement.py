"""Where the jobs of a scenario go, if it says how many GPUs each has on which node."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot
from unicron_lib.planning import placement
from unicron_lib.planning.allocation import Allocation, Request
from unicron_lib.planning.fitting import Fitted, fit
from unicron_lib.planning.layout_choice import Layouts
from unicron_lib.planning.placement import Placement, Rules

OnNode = tuple[str, ...] | Mapping[str, int]
"""The jobs of a node, or also how many GPUs each has there."""


def counted(nodes: Mapping[str, OnNode]) -> dict[str, Mapping[str, int]] | None:
    """GPUs by job and node, None unless every node tells them."""
    found = {name: on_it for name, on_it in nodes.items() if isinstance(on_it, Mapping)}
    return found if found and len(found) == len(nodes) else None


def fitted(
    request: Request,
    nodes: Mapping[str, Mapping[str, int]],
    *,
    num_nodes: int,
    gpus_per_node: int,
    groups: Callable[[Mapping[str, int]], Mapping[str, int]],
    max_jobs_per_node: int | None,
    share: Callable[[Request], Allocation],
) -> Fitted:
    """Allocation and placement on `num_nodes` healthy nodes, of which `nodes` are known; the others are empty.

    `groups` gives the GPUs of a job's tensor-parallel group, by job, for an allocation.
    """
    empty = (f"(empty {number})" for number in range(1, num_nodes - len(nodes) + 1))
    made = [Node(id=name, boot="", address="", num_gpus=gpus_per_node) for name in (*nodes, *empty)]
    current = _slots(nodes)

    def place(gpus: Mapping[str, int], _: Layouts) -> Placement:
        rules = Rules(max_jobs_per_node=max_jobs_per_node, group_gpus=groups(gpus))
        return placement.arrange(gpus, current, made, rules)

    return fit(request, share=share, place=place)


def as_json(found: Placement) -> dict[str, Any]:
    """The keys `placement` (GPUs by job and node) and `moved_gpus` of the answer."""
    where = {job: dict(Counter(slot.node for slot in slots)) for job, slots in sorted(found.slots.items()) if slots}
    return {"placement": where, "moved_gpus": found.moved}


def _slots(nodes: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[Slot, ...]]:
    held: dict[str, tuple[Slot, ...]] = {}
    for node, jobs in nodes.items():
        first = 0
        for job, gpus in jobs.items():
            held[job] = (*held.get(job, ()), *(Slot(node, gpu) for gpu in range(first, first + gpus)))
            first += gpus
    return held
