"""How the ranks of a new generation go on with what is left in their memories: a pure function of what each of them has.

Every rank computes it for itself from the same standings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank has when it comes into a generation.

    `iteration` (0-based, -1: none) is complete in its parameters, and `lineage` the generation that did or loaded it: equal
    pairs mean equal bits. Of the iteration `under_way` (-1: none) its buffer holds the micro-batches `done`; the buckets in
    `reduced` hold everybody's, summed in the generation given. `share` are the micro-batches that it would have done anyway.
    """

    rank: int
    node: str
    has_state: bool
    iteration: int = -1
    lineage: int = -1
    loss: float = 0.0
    under_way: int = -1
    share: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    reduced: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """From where the ranks go on: `iteration` is complete in the parameters of all once the copies are done.

    `holders` have that state; without any, all load the fallback. `source_of` names for every rank the one that gives it the
    state, None if it needs none or loads the fallback. `keeps` are the micro-batches in each rank's buffer that count; a rank
    whose entry is smaller than what it has done clears all buckets that are not final. `reduced` are the final buckets, and the
    generation that summed each; `bucket_from` names who gives them to the ranks in `lacks`. `todo` are the micro-batches
    that each rank is to add to the other buckets, `in_place_of_lost` those among them that were no rank's here.
    """

    iteration: int
    lineage: int
    loss: float
    holders: tuple[int, ...]
    source_of: Mapping[int, int | None]
    keeps: Mapping[int, frozenset[int]]
    reduced: Mapping[int, int]
    bucket_from: Mapping[int, int]
    lacks: Mapping[int, tuple[int, ...]]
    todo: Mapping[int, tuple[int, ...]]
    in_place_of_lost: Mapping[int, tuple[int, ...]]

    @property
    def is_resumed(self) -> bool:
        """Whether something of the iteration under way is kept."""
        return bool(self.reduced) or any(self.keeps.values())

    @property
    def loads_fallback(self) -> bool:
        """Whether all ranks begin from the fallback."""
        return not self.holders


def agree(standings: Sequence[Standing], *, num_micro_batches: int, num_buckets: int, fallback_iteration: int) -> Agreement:
    """Decide, given everybody's standing; `fallback_iteration` is the last one in the checkpoint that all were given, -1: none.

    The state that is furthest wins. Several ranks may have got there by different sums (one was cut off, the others did the
    iteration again): the newest generation's counts. Whoever has no such state gets it from the nearest rank that has it.
    """
    standings = sorted(standings, key=lambda s: s.rank)
    holders = _holders(standings, fallback_iteration)
    working = [s for s in holders if s.under_way == s.iteration + 1]
    givers = {b: _newest(working, b) for b in range(num_buckets) if any(b in s.reduced for s in working)}
    reduced = {b: giver.reduced[b] for b, giver in givers.items()}
    keeps = _without_doubles(standings, working)
    todo = _todo(standings, keeps, num_micro_batches, num_left=num_buckets - len(reduced))
    own = frozenset[int]().union(*(s.share for s in working))
    is_resumed = bool(reduced) or any(keeps.values())
    return Agreement(
        iteration=holders[0].iteration if holders else fallback_iteration,
        lineage=holders[0].lineage if holders else -1,
        loss=holders[0].loss if holders else 0.0,
        holders=tuple(s.rank for s in holders),
        source_of=_sources(standings, holders),
        keeps=keeps,
        reduced=reduced,
        bucket_from={b: giver.rank for b, giver in givers.items()},
        lacks={b: tuple(s.rank for s in standings if s not in working or s.reduced.get(b) != reduced[b]) for b in reduced},
        todo=todo,
        in_place_of_lost={rank: tuple(m for m in todo[rank] if is_resumed and m not in own) for rank in todo},
    )


def _holders(standings: Sequence[Standing], fallback_iteration: int) -> list[Standing]:
    """The ranks with the newest state; none if the fallback is newer."""
    whole = [s for s in standings if s.has_state]
    best = max(((s.iteration, s.lineage) for s in whole), default=(-2, -1))
    return [s for s in whole if (s.iteration, s.lineage) == best] if best[0] >= fallback_iteration else []


def _newest(working: Sequence[Standing], bucket: int) -> Standing:
    """Who gives a final bucket: the newest sum counts, so that all have the same one."""
    return max((s for s in working if bucket in s.reduced), key=lambda s: (s.reduced[bucket], -s.rank))


def _without_doubles(standings: Sequence[Standing], working: Sequence[Standing]) -> dict[int, frozenset[int]]:
    """What counts of each buffer. Two ranks with the same micro-batch: a sum cannot be taken apart, one loses all of it."""
    counted = set[int]()
    keeps = {s.rank: frozenset[int]() for s in standings}
    for standing in sorted(working, key=lambda s: (-len(s.done), s.rank)):
        if counted.isdisjoint(standing.done):
            keeps[standing.rank] = frozenset(standing.done)
            counted |= standing.done
    return keeps


def _sources(standings: Sequence[Standing], holders: Sequence[Standing]) -> dict[int, int | None]:
    """Who copies from whom: a holder on the same node if there is one, the one with the fewest others."""
    served = {holder.rank: 0 for holder in holders}
    sources: dict[int, int | None] = {}
    for standing in standings:
        if not served or standing.rank in served:
            sources[standing.rank] = None
            continue
        near = [holder.rank for holder in holders if holder.node == standing.node] or list(served)
        source = min(near, key=lambda rank: (served[rank], rank))
        served[source] += 1
        sources[standing.rank] = source
    return sources


def _todo(
    standings: Sequence[Standing], keeps: Mapping[int, frozenset[int]], num_micro_batches: int, *, num_left: int
) -> dict[int, tuple[int, ...]]:
    """The missing micro-batches in turn to all ranks, newcomers too; none if no buckets are left."""
    counted = frozenset[int]().union(*keeps.values())
    missing = [m for m in range(num_micro_batches) if m not in counted] if num_left else []
    return {s.rank: tuple(missing[s.rank :: len(standings)]) for s in standings}
