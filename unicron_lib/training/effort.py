"""What a rank has done for the iteration under way: it outlives the generation in which it was done."""

from collections.abc import Sequence
from dataclasses import dataclass, field

NONE = -1


@dataclass(slots=True, kw_only=True)
class Effort:
    """How far a rank is in the iteration under way (0-based; -1: in none).

    Every bucket of the replica's buffer that is not in `reduced` holds the gradients of exactly the micro-batches `done`;
    one that is holds the sum over all micro-batches of the job. `reduced` says in which generation a bucket was summed:
    buckets that were summed twice, by different sets of ranks, differ in the last digits. `share` are the micro-batches that
    were the rank's when it began, `todo` those that it is still to do. `is_resumed` tells that ranks of an earlier generation
    have begun the iteration: the work left is uneven, and its duration means nothing. In the generation `prepared_in` the rank
    was ready to step: all that it lacked was what its siblings said at the very end.
    """

    iteration: int = NONE
    share: tuple[int, ...] = ()
    todo: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    reduced: dict[int, int] = field(default_factory=dict)
    is_resumed: bool = False
    prepared_in: int = NONE

    def begin(self, iteration: int, micro_batches: Sequence[int]) -> None:
        """Begin a new iteration, with an empty buffer."""
        self.iteration, self.share, self.is_resumed = iteration, tuple(micro_batches), False
        self.todo, self.done, self.reduced = list(micro_batches), set(), {}
        self.prepared_in = NONE

    def finish(self, micro_batch: int) -> None:
        """The gradients of one that was to do are in all buckets that are not final."""
        self.todo.remove(micro_batch)
        self.done.add(micro_batch)

    def prepare(self, generation: int) -> None:
        """The rank is ready to step in that generation."""
        self.prepared_in = generation

    def clear(self) -> None:
        """Be in no iteration: the last one is complete, or what was done of it is worth nothing."""
        self.begin(NONE, ())
