"""Parts that are on one node each: whichever of them is lost, and whenever, an iteration that has travelled is left."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.checkpointing.slot_header import SlotHeader
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.memory import HeldSlot, choose
from unicron_lib.training.snapshots import Snapshots

PARTS = Layout(pp=3).parts
LAYOUT_AFTER = dict.fromkeys(Layout(tp=2).parts, ("0", "1", "2"))
SPEC = JobSpec(job="a")
arrivals = st.sets(st.integers(0, 2))
rounds = st.tuples(arrivals, arrivals, st.integers(1, 3))
"""Whose part arrives at the next node, whose agent then says so, and how many iterations are done."""


def write(pair: SlotPair, header: SlotHeader, data: bytes) -> None:
    claim = pair.claim(len(data))
    claim.data[:] = data
    claim.commit(header)


class Nodes:
    """Three nodes with a part each, and a copy of their neighbour's."""

    def __init__(self, directory: Path) -> None:
        self.houses = [SlotHouse(directory / str(node)) for node in range(3)]
        self.sending = [house.travelling("a", part) for house, part in zip(self.houses, PARTS, strict=True)]
        self.ranks = [Snapshots(house.pair("a", part), SPEC, travelling=slot) for house, part, slot in self._each()]
        self.iteration = -1
        self.arrived = [-1, -1, -1]

    def _each(self):
        return zip(self.houses, PARTS, self.sending, strict=True)

    def iterate(self) -> None:
        """All ranks keep the iteration, and if none of the last travels any more, this one is to."""
        self.iteration += 1
        travels = all(rank.may_travel(1) for rank in self.ranks)
        for house, part, slot in self._each():
            data = bytes([self.iteration % 256]) * 64
            header = self._header(part, memoryview(data))
            write(house.pair("a", part), header, data)
            if travels:
                slot.put_aside()
                write(slot, header, data)

    def _header(self, part: str, data: memoryview) -> SlotHeader:
        told = {"job": "a", "generation": 1, "iteration": self.iteration, "consumed_samples": 1, "loss": 1.0}
        return SlotHeader(**told, num_bytes=len(data), digest=digest_of(data), part=part)

    def deliver(self, node: int) -> None:
        """What is to travel from a node arrives at the next one."""
        for found in self.sending[node].found():
            with self.sending[node].reading(found.place) as (header, data):
                if header.iteration > self.arrived[node]:
                    write(self.houses[(node + 1) % 3].pair("a", PARTS[node]), header, bytes(data))
                    self.arrived[node] = header.iteration

    def mark(self, node: int) -> None:
        """Its agent says so, after the pause."""
        self.sending[node].mark_travelled((1, self.arrived[node]))

    def left_without(self, lost: int) -> int:
        slots = [
            HeldSlot(node=str(node), place=it.place, num_bytes=it.num_bytes, part=it.part)
            for node, house in enumerate(self.houses)
            if node != lost
            for it in house.compared("a")[0]
        ]
        source = choose(slots, LAYOUT_AFTER, floor=0, saved=None, racks={})
        return source.place[1] if source else -1


@settings(max_examples=25, deadline=None)
@given(st.lists(rounds, min_size=3, max_size=8))
def test_what_has_travelled_stays_until_the_next_one_has(taken: list[tuple[set[int], set[int], int]]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="parts-"))
    try:
        nodes = Nodes(directory)
        for delivered, marked, iterations in taken:
            for node in delivered:
                nodes.deliver(node)
            for node in marked:
                nodes.mark(node)
            for _ in range(iterations):
                nodes.iterate()
            for lost in range(3):
                assert nodes.left_without(lost) >= nodes.arrived[lost]
    finally:
        shutil.rmtree(directory)
