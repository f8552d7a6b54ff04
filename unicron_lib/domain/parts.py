"""The parts of a state that the ranks of a replica have, by their names: which layout has cut it so, and which parts overlap.

What a part has of a layer follows from its fraction of the lines, and the layers from its fraction of the stages: no model
needs to be known. What several parts have, such as the tied embedding of the first and the last stage, each of them has whole.
"""

import re

from unicron_lib.domain.plans import Layout, Place

_NAME = re.compile(r"tp(\d{1,6})of(\d{1,6})-pp(\d{1,6})of(\d{1,6})", re.ASCII)


def replica_with(part: str) -> Layout | None:
    """The layout of one replica that has a part of that name; "" is a whole state. None if no layout has it."""
    if not part:
        return Layout()
    found = _NAME.fullmatch(part)
    if found is None:
        return None
    line, tp, stage, pp = map(int, found.groups())
    layout = Layout(tp=tp, pp=pp)
    return layout if line < tp and stage < pp and layout.part(stage * tp + line) == part else None


def place_of(part: str) -> Place:
    """Where the rank of a replica is that has the part."""
    found = _NAME.fullmatch(part)
    return Place(tp=int(found[1]), pp=int(found[3])) if found else Place()


def overlapping(part: str, layout: Layout) -> tuple[str, ...]:
    """The parts that a state cut as in `layout` has which hold something of `part`: all of it together."""
    own, place = replica_with(part), place_of(part)
    assert own is not None
    lines = _meeting(place.tp, own.tp, layout.tp)
    stages = _meeting(place.pp, own.pp, layout.pp)
    return tuple(layout.part(stage * layout.tp + line) for stage in stages for line in lines)


def _meeting(number: int, of: int, others: int) -> range:
    """Which of `others` equal pieces have something of piece `number` of `of`."""
    return range(number * others // of, -(-(number + 1) * others // of))
