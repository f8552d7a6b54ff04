"""How the ranks of a new generation go on with what is left in their memories: a pure function of what each of them has.

Every rank computes it for itself from the same standings. A replica is `replica_size` ranks with consecutive numbers, a column
the ranks with the same place in their replicas: their states, and their sums, are alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank has when it comes into a generation.

    `iteration` (0-based, -1: none) is complete in its parameters, and `lineage` the generation that did or loaded it: equal
    pairs mean equal bits. Of the iteration `under_way` (-1: none) its buffer holds the micro-batches `done`; the buckets in
    `reduced` hold everybody's, summed in the generation given. `share` are the micro-batches that it would have done anyway.
    `grad_norm` is that of `iteration`, if known. A rank of several in a replica was ready to complete the one under way in the
    generation `prepared_in`, but for what its siblings said at the end. The last generation that it `was_in` (-1: none) is the
    last one in whose sums it had its part.
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
    grad_norm: float | None = None
    prepared_in: int = -1
    was_in: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """From where the ranks go on: `iteration` is complete in the parameters of all once the copies are done.

    Before them the ranks in `steps` complete what they were prepared for, with what others know who have done so already.
    `holders` have that state; without any, all load the fallback. `source_of` names for every rank the one that gives it the
    state, None if it needs none or loads the fallback. `keeps` are the micro-batches in each rank's buffer that count; a rank
    whose entry is smaller than what it has done clears all buckets that are not final. `reduced` are the final buckets, and the
    generation that summed each; `bucket_from` names who gives them to the ranks in `lacks`. `todo` are the micro-batches
    that each rank is to add to the other buckets, `in_place_of_lost` those among them that were no rank's here. What is said of
    buckets is said of one column; `is_resumed` tells whether something of the iteration under way is kept in any.

    `discards` is the work that is lost: the micro-batches of the iteration under way that each rank had complete, and whose
    results go into the training nowhere. A rank's `done` are those that it keeps, that it discards, and that are in the state
    agreed on, or in the final buckets if all are final. Where others have completed an iteration without a rank that was away,
    they may have had its sums or not: that cannot be told, and counts as lost. Not counted are whole iterations that are gone
    back over, and what ranks had done that are not here.
    """

    iteration: int
    lineage: int
    loss: float
    grad_norm: float | None
    holders: tuple[int, ...]
    source_of: Mapping[int, int | None]
    keeps: Mapping[int, frozenset[int]]
    reduced: Mapping[int, int]
    bucket_from: Mapping[int, int]
    lacks: Mapping[int, tuple[int, ...]]
    todo: Mapping[int, tuple[int, ...]]
    in_place_of_lost: Mapping[int, tuple[int, ...]]
    discards: Mapping[int, frozenset[int]]
    is_resumed: bool
    steps: Mapping[int, Standing] = field(default_factory=dict)

    @property
    def loads_fallback(self) -> bool:
        """Whether all ranks begin from the fallback."""
        return not self.holders


def agree(
    standings: Sequence[Standing],
    *,
    num_micro_batches: int,
    num_buckets: int,
    fallback_iteration: int,
    fallback_generation: int = -1,
    replica_size: int = 1,
    column: int = 0,
) -> Agreement:
    """Decide, given everybody's standing; `fallback_iteration` is the last one in the checkpoint that all were given, -1: none.

    `fallback_generation` wrote it, -1: not known.

    The state that is furthest wins, of those that every column has. Several ranks may have got there by different sums (one was
    cut off, the others did the iteration again): the newest generation's counts. Whoever has no such state gets it from the
    nearest rank of its column that has it. The answer tells of the buckets of one `column`.
    """
    steps = _steps(standings)
    standings = [_stepped(s, steps.get(s.rank)) for s in sorted(standings, key=lambda s: s.rank)]
    holders = _holders(standings, fallback_iteration, replica_size)
    working = [s for s in holders if s.under_way == s.iteration + 1]
    columns = [[s for s in working if s.rank % replica_size == place] for place in range(replica_size)]
    final = [{b for s in ranks for b in s.reduced if b < num_buckets} for ranks in columns]
    givers = {b: _newest(columns[column], b) for b in sorted(final[column])}
    reduced = {b: giver.reduced[b] for b, giver in givers.items()}
    keeps = _without_doubles(standings, working, replica_size)
    best = (holders[0].iteration, holders[0].lineage) if holders else (fallback_iteration, fallback_generation)
    is_anything_left = any(len(buckets) < num_buckets for buckets in final)
    todo = _todo(standings, keeps, num_micro_batches if is_anything_left else 0, replica_size)
    own = frozenset[int]().union(*(s.share for s in working))
    is_resumed = any(final) or any(keeps.values())
    in_column = [s for s in standings if s.rank % replica_size == column]
    return Agreement(
        iteration=best[0],
        lineage=holders[0].lineage if holders else -1,
        loss=holders[0].loss if holders else 0.0,
        grad_norm=next((s.grad_norm for s in holders if s.grad_norm is not None), None),
        holders=tuple(s.rank for s in holders),
        source_of=_sources(standings, holders, replica_size),
        keeps=keeps,
        reduced=reduced,
        bucket_from={b: giver.rank for b, giver in givers.items()},
        lacks={b: tuple(s.rank for s in in_column if s not in working or s.reduced.get(b) != reduced[b]) for b in reduced},
        todo=todo,
        in_place_of_lost={rank: tuple(m for m in todo[rank] if is_resumed and m not in own) for rank in todo},
        discards=_discards(standings, keeps, best, whole=() if is_anything_left else working),
        is_resumed=is_resumed,
        steps=steps,
    )


def _steps(standings: Sequence[Standing]) -> dict[int, Standing]:
    """Who can complete its iteration, and after whom: in a replica that is cut off, one rank may step and another one not.

    Whoever has stepped has heard of all its siblings that they were prepared; and all replicas of that generation step alike.
    """
    ahead = {(s.iteration, s.lineage): s for s in standings if s.has_state and s.grad_norm is not None}
    prepared = (s for s in standings if s.has_state and s.prepared_in >= 0 and s.under_way == s.iteration + 1)
    return {s.rank: ahead[s.under_way, s.prepared_in] for s in prepared if (s.under_way, s.prepared_in) in ahead}


def _stepped(standing: Standing, ahead: Standing | None) -> Standing:
    """As the rank stands once it has done as the one ahead of it."""
    if ahead is None:
        return standing
    nothing = frozenset[int]()
    state = replace(standing, iteration=ahead.iteration, lineage=ahead.lineage, loss=ahead.loss, grad_norm=ahead.grad_norm)
    return replace(state, under_way=-1, share=nothing, done=nothing, reduced={})


def _holders(standings: Sequence[Standing], fallback_iteration: int, replica_size: int) -> list[Standing]:
    """The ranks with the newest state that every column has; none if the fallback is newer."""
    whole = [s for s in standings if s.has_state]
    had = [{(s.iteration, s.lineage) for s in whole if s.rank % replica_size == place} for place in range(replica_size)]
    best = max(set.intersection(*had), default=(-2, -1))
    return [s for s in whole if (s.iteration, s.lineage) == best] if best[0] >= fallback_iteration else []


def _newest(working: Sequence[Standing], bucket: int) -> Standing:
    """Who gives a final bucket: the newest sum counts, so that all have the same one."""
    return max((s for s in working if bucket in s.reduced), key=lambda s: (s.reduced[bucket], -s.rank))


def _without_doubles(
    standings: Sequence[Standing], working: Sequence[Standing], replica_size: int
) -> dict[int, frozenset[int]]:
    """What counts of each buffer: what all ranks of the replica have done, and no other replica.

    A sum cannot be taken apart: a replica that has done a micro-batch twice, or in parts, loses all of it.
    """
    done = {s.rank: s.done for s in working}
    counted = set[int]()
    keeps = {s.rank: frozenset[int]() for s in standings}
    firsts = range(0, len(standings), replica_size)
    for first in sorted(firsts, key=lambda first: (-len(done.get(first, ())), first)):
        ranks = range(first, first + replica_size)
        mine = done.get(first, frozenset())
        if counted.isdisjoint(mine) and all(done.get(rank) == mine for rank in ranks):
            keeps |= dict.fromkeys(ranks, frozenset(mine))
            counted |= mine
    return keeps


def _sources(standings: Sequence[Standing], holders: Sequence[Standing], replica_size: int) -> dict[int, int | None]:
    """Who copies from whom: a holder on the same node if there is one, the one with the fewest others."""
    served = {holder.rank: 0 for holder in holders}
    sources: dict[int, int | None] = {}
    for standing in standings:
        if not served or standing.rank in served:
            sources[standing.rank] = None
            continue
        alike = [holder for holder in holders if (holder.rank - standing.rank) % replica_size == 0]
        near = [holder.rank for holder in alike if holder.node == standing.node] or [holder.rank for holder in alike]
        source = min(near, key=lambda rank: (served[rank], rank))
        served[source] += 1
        sources[standing.rank] = source
    return sources


def _todo(
    standings: Sequence[Standing], keeps: Mapping[int, frozenset[int]], num_micro_batches: int, replica_size: int
) -> dict[int, tuple[int, ...]]:
    """The missing micro-batches in turn to all replicas, new ones too."""
    counted = frozenset[int]().union(*keeps.values())
    missing = [m for m in range(num_micro_batches) if m not in counted]
    num_replicas = len(standings) // replica_size
    return {s.rank: tuple(missing[s.rank // replica_size :: num_replicas]) for s in standings}


def contains(iteration: int, lineage: int, *, under_way: int, was_in: int) -> bool:
    """Whether a state has in it what a rank had done of the iteration `under_way`.

    The generation that completed it did so with all of its ranks.
    """
    return under_way <= iteration and was_in == lineage


def _discards(
    standings: Sequence[Standing], keeps: Mapping[int, frozenset[int]], best: tuple[int, int], *, whole: Sequence[Standing]
) -> dict[int, frozenset[int]]:
    """What each rank has done for nothing, all going on after the state `best`; of those in `whole` all is in final buckets."""
    return {
        s.rank: frozenset() if s in whole or contains(*best, under_way=s.under_way, was_in=s.was_in) else s.done - keeps[s.rank]
        for s in standings
    }
