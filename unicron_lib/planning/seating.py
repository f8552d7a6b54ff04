"""Which rank lives on which of a job's GPUs: who lives on keeps its place in its replica, since what it holds fits no other."""

from collections.abc import Mapping, Sequence

from unicron_lib.domain.plans import Assignment, Layout, Place, Slot

Slots = tuple[Slot, ...]


def seat(slots: Slots, layout: Layout, before: Assignment | None) -> Slots:
    """The GPUs in the order of the ranks, given those of the job until now.

    Replicas that are kept whole come first. GPUs in groups of `layout.tp` stay on their node: `slots` are in the order of
    nodes, with whole groups on each. Replicas of one rank, and those cut otherwise than before, stay in the order of `slots`.
    """
    if layout.replica_size == 1 or before is None or (layout.tp, layout.pp) != (before.layout.tp, before.layout.pp):
        return slots
    whole = [replica for replica in _parts(before.slots, layout.replica_size) if set(replica) <= set(slots)][: layout.dp]
    kept = tuple(slot for replica in whole for slot in replica)
    rest = tuple(slot for slot in slots if slot not in set(kept))
    held = {slot: layout.place(rank) for rank, slot in enumerate(before.slots)}
    lines = [_line(line, held) for line in _parts(rest, layout.tp)]
    return (*kept, *_in_stages(lines, layout, held))


def _line(line: Slots, held: Mapping[Slot, Place]) -> Slots:
    """The GPUs of one line: who has had a slice keeps it, if it is the only one."""
    seats: list[Slot | None] = [None] * len(line)
    standing: list[Slot] = []
    for slot in line:
        number = held[slot].tp if slot in held else None
        if number is not None and seats[number] is None:
            seats[number] = slot
        else:
            standing.append(slot)
    return tuple(slot if slot is not None else standing.pop(0) for slot in seats)


def _in_stages(lines: Sequence[Slots], layout: Layout, held: Mapping[Slot, Place]) -> Slots:
    """Lines in the order of ranks: one goes to the stage that most of its GPUs come from, if there is room."""
    left = list(lines)
    room = {stage: len(lines) // layout.pp for stage in range(layout.pp)}
    seated: dict[int, list[Slots]] = {stage: [] for stage in range(layout.pp)}
    for line in lines:
        stages = [held[slot].pp for slot in line if slot in held]
        stage = max(sorted(set(stages)), key=stages.count, default=None)
        if stage is not None and len(seated[stage]) < room[stage]:
            seated[stage].append(line)
            left.remove(line)
    for stage, own in seated.items():
        while len(own) < room[stage]:
            own.append(left.pop(0))
    return tuple(slot for replica in zip(*seated.values(), strict=True) for line in replica for slot in line)


def _parts(slots: Sequence[Slot], size: int) -> list[Slots]:
    return [tuple(slots[first : first + size]) for first in range(0, len(slots), size)]
