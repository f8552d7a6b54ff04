"""Who meets whom in a node check: at most three waves of meetings, whatever the number and the share of faulty nodes. Pure.

The first wave pairs all nodes (Acme, fast fault detection), and those of a failed pair are suspects. In the second each node
that has proved good takes a suspect, of as many failed pairs as there are good nodes; suspects that are left over meet others
that they have not met. In the last one the good nodes take who may be cleared or convicted by it, several at once if need be:
what passes clears them all. So the answer is exact while at most a third of the nodes are bad; beyond, some may stay suspects.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from unicron_lib.diagnosis.node_check import CheckVerdict, Finding, Group, Meeting, absent_nodes, verdicts

MAX_WAVES = 3


def next_groups(nodes: Sequence[str], meetings: Sequence[Meeting]) -> tuple[Group, ...]:
    """Who is to meet next, nobody twice; empty once nothing more can be found out, or after the last wave."""
    wave = 1 + max((meeting.turn for meeting in meetings), default=-1)
    if wave == 0:
        return _first(nodes)
    found = verdicts(nodes, meetings)
    present = [name for name in nodes if name not in absent_nodes(meetings)]
    suspects = [name for name in present if found[name].verdict is CheckVerdict.UNDETERMINED]
    good = [name for name in present if found[name].verdict is CheckVerdict.GOOD]
    if wave == MAX_WAVES or not suspects:
        return ()
    if not good:
        return tuple(_strangers(suspects, meetings))
    if wave == MAX_WAVES - 1:
        return _last(suspects, good, _Doubts(suspects, found, meetings))
    ordered = sorted(suspects, key=lambda name: _place(name, meetings))
    return (*zip(ordered, good, strict=False), *_strangers(ordered[len(good) :], meetings))


def _first(nodes: Sequence[str]) -> tuple[Group, ...]:
    """Neighbours in pairs; of an odd number the last three together, or, where a third of them can be bad, one waits."""
    pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
    if len(pairs) > 1 and len(pairs[-1]) == 1:
        last = pairs.pop()
        pairs[-1] += last if len(nodes) % 3 else ()
    return tuple(pairs)


def _place(name: str, meetings: Iterable[Meeting]) -> int:
    """Its place in its first group: by it, the good take one of each group before they take two of any.

    -1, so before all others, if somebody did not come to it: twice it has to fail before it is called faulty.
    """
    return next((it.nodes.index(name) if it.counts else -1 for it in meetings if name in it.nodes), 0)


def _strangers(suspects: Sequence[str], meetings: Iterable[Meeting]) -> Iterator[Group]:
    """Pairs of suspects that have not met as a pair, as many as can meet at the same time."""
    met = {frozenset(meeting.nodes) for meeting in meetings}
    left = list(suspects)
    while left:
        first = left.pop(0)
        partner = next((name for name in left if {first, name} not in met), None)
        if partner:
            left.remove(partner)
            yield first, partner


def _last(suspects: Sequence[str], good: Sequence[str], doubts: "_Doubts") -> tuple[Group, ...]:
    """The good take one each, who may be cleared before who may be convicted; if they are too few, several of the former."""
    if len(suspects) <= len(good):
        return tuple(zip(suspects, good, strict=False))
    healthy = [name for name in suspects if name not in doubts.bad]
    to_convict = [name for name in suspects if name in doubts.bad and not doubts.follows(name, {*good, *healthy})]
    takers = min(len(healthy), len(good))
    shared = [(*healthy[at::takers], good[at]) for at in range(takers)]
    return (*shared, *zip(to_convict, good[takers:], strict=False))


class _Doubts:
    """The fewest suspects, about, whose being bad explains all that went wrong."""

    def __init__(self, suspects: Sequence[str], found: Mapping[str, Finding], meetings: Iterable[Meeting]) -> None:
        known = {name for name, finding in found.items() if finding.verdict in {CheckVerdict.FAULTY, CheckVerdict.STRAGGLER}}
        good = {name for name, finding in found.items() if finding.verdict is CheckVerdict.GOOD}
        self._counted = [meeting for meeting in meetings if meeting.counts]
        # suspects are those who were in no meeting that went well
        open_ = [set(it.nodes) - good for it in self._counted if not set(it.nodes) & known and not set(it.nodes) <= good]
        self.bad = set[str]()
        while open_:
            certain = next((min(it) for it in open_ if len(it) == 1), None)
            worst = certain or max(suspects, key=lambda name: sum(name in it for it in open_))
            self.bad.add(worst)
            open_ = [it for it in open_ if worst not in it]

    def follows(self, name: str, good: AbstractSet[str]) -> bool:
        """Whether it is convicted by what has happened already, if all these are good."""
        again = [meeting for meeting in self._counted if name in meeting.nodes][1:]
        return any(set(meeting.nodes) - {name} <= good for meeting in again)
