"""When a rank keeps its state in host memory, beyond its process, and when it begins from there.

Ranks that are whole replicas keep theirs whenever that is due. Of cut replicas only parts of one iteration are of use, so that
all ranks keep the same ones: rank 0 finds one due, and whoever is not through with the last one puts it off. The same holds for
what travels to other nodes. They tell each other along with the gradient.
"""

from collections.abc import Callable

from unicron_lib.agent.rank_messages import SLOT
from unicron_lib.detection.sections import Section
from unicron_lib.training.agreement import contains
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.handover import Memory
from unicron_lib.training.replica import Reduced

FOR_ANOTHER_NODE = 2
Votes = tuple[float, float]


class Keeping:
    """One rank's part in it, in one generation."""

    def __init__(self, env: RankEnvironment, memory: Memory, mark: Callable[[Section], None]) -> None:
        self._env = env
        self._memory = memory
        self._mark = mark
        self._is_cut = not memory.replica.siblings.are_none

    def votes(self, iteration: int) -> Votes:
        """For keeping the state after `iteration`, and for sending it.

        The sums over all ranks must be positive, and at least 0.
        """
        snapshots = self._memory.snapshots
        if snapshots is None or not self._is_cut or not self._env.keeps:
            return 0.0, 0.0
        keep = -1.0 if snapshots.is_busy or snapshots.is_off else float(self._env.rank == 0 and snapshots.is_due(iteration))
        waits = self._env.keeps >= FOR_ANOTHER_NODE and not snapshots.may_travel(self._env.generation)
        return keep, -float(waits)

    def keep(self, reduced: Reduced) -> bool:
        """Copy the state that an iteration has ended with, if all want it, for all ranks of the node that have the same."""
        snapshots, position = self._memory.snapshots, self._memory.position
        if snapshots is None or not self._env.keeps:
            return False
        if not (reduced.keep if self._is_cut else snapshots.is_due(position.iteration)):
            return False
        self._mark(Section.CHECKPOINT)
        travels = reduced.travels and self._env.keeps >= FOR_ANOTHER_NODE
        return snapshots.keep(position, self._memory.replica.state(), travels=travels)


def begin_from_slot(memory: Memory, env: RankEnvironment, *, fallback_iteration: int) -> None:
    """Take the state in this node's memory that the generation begins from: it is as good as a survivor's.

    A part of a replica is given up for it: who has lived on has it because the other parts of what it has are gone. Parts of
    another layout are of use to those whose node has all that they need; the others copy from them.
    """
    place, position, is_cut = env.memory_slot, memory.position, not memory.replica.siblings.are_none
    if memory.snapshots is None or place is None or place[1] < fallback_iteration:
        return
    if position.is_whole and (not is_cut or place == (position.generation, position.iteration)):
        return
    kept_in = env.memory_layout
    if memory.snapshots.restore(place, memory.replica, position, kept_in=kept_in):
        if not contains(place[1], place[0], under_way=memory.effort.iteration, was_in=memory.was_in):
            memory.given_up += len(memory.effort.done)
        memory.effort.clear()
        memory.came_from = f"{SLOT}{env.node}{f' (resharded from {kept_in.shape})' if kept_in else ''}"


def keep_the_last(memory: Memory) -> None:
    """Keep the state that the rank leaves with, which is saved: those who go on from it need not get it from the store."""
    if memory.snapshots is not None:
        memory.snapshots.settle()
        memory.snapshots.keep(memory.position, memory.replica.state())
        memory.snapshots.settle()
