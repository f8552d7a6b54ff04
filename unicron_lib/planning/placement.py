"""Which GPUs each job gets: whoever does not change stays put, whoever does moves as little as possible."""

from collections import Counter
from collections.abc import Mapping, Sequence

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.plans import Slot

Slots = tuple[Slot, ...]


def place(wanted: Mapping[str, int], current: Mapping[str, Slots], nodes: Sequence[Node]) -> dict[str, Slots]:
    """The GPUs of each job on `nodes`, in the order of ranks: neighbours on a node are neighbours in rank.

    A job whose size stays and whose GPUs are all among `nodes` keeps them as they are. Others keep as many of theirs
    as they can, preferably whole nodes; what they lack comes from nodes that they are on already, then from the
    fewest nodes. `wanted` must not exceed the GPUs of `nodes` in sum.
    """
    offered = {slot for node in nodes for slot in node.slots}
    kept: dict[str, Slots] = {}
    for job, num_gpus in wanted.items():
        slots = current.get(job, ())
        surviving = tuple(slot for slot in slots if slot in offered)
        kept[job] = slots if len(surviving) == len(slots) == num_gpus else _keep(surviving, num_gpus)
    free = offered.difference(*kept.values())
    missing = {job: num_gpus - len(kept[job]) for job, num_gpus in wanted.items()}
    if sum(missing.values()) > len(free):
        raise ValueError(f"{sum(wanted.values())} GPUs are wanted, the nodes have {len(offered)}")
    # the greatest need first: it profits most from whole nodes
    for job in sorted(missing, key=lambda job: (-missing[job], job)):
        if missing[job]:
            added = _take(free, missing[job], at=frozenset(slot.node for slot in kept[job]))
            free -= added
            kept[job] = tuple(sorted({*kept[job], *added}))
    return kept


def _keep(slots: Slots, num_gpus: int) -> Slots:
    """The `num_gpus` of the job's own GPUs that span the fewest nodes."""
    on_node = Counter(slot.node for slot in slots)
    by_node = sorted(slots, key=lambda slot: (-on_node[slot.node], slot))
    return tuple(sorted(by_node[:num_gpus]))


def _take(free: set[Slot], num_gpus: int, *, at: frozenset[str]) -> set[Slot]:
    """`num_gpus` free GPUs: first on the nodes `at`, then node by node, each the best fit for what is still missing."""
    taken: set[Slot] = set()
    while len(taken) < num_gpus:
        lacking = num_gpus - len(taken)
        room = Counter(slot.node for slot in free - taken)
        node = min(room, key=lambda node: _misfit(room[node], lacking, node=node, is_home=node in at))
        taken.update(sorted(slot for slot in free - taken if slot.node == node)[:lacking])
    return taken


def _misfit(room: int, lacking: int, *, node: str, is_home: bool) -> tuple[bool, bool, int, str]:
    """Orders nodes: its own first, then the tightest that covers all that is lacking, else the roomiest."""
    covers = room >= lacking
    return not is_home, not covers, room if covers else -room, node
