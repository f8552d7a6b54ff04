"""Ranks that live through any history agree on something that counts each micro-batch once in each bucket.

The model is exact: a bucket is the multiset of the results that are summed in it. Standings come from a history of
generations, in each of which ranks compute, sum buckets, step, get lost, sit out, and come back with an old memory.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.training.agreement import Agreement, Standing, agree
from unicron_lib.training.data import share

MICRO_BATCHES, BUCKETS = 7, 3
ALL = Counter(range(MICRO_BATCHES))
numbers = count()


def result_of(micro_batch: int) -> int:
    """A result like no other one: its remainder tells the micro-batch."""
    return next(numbers) * MICRO_BATCHES + micro_batch


def micro_batches(results) -> Counter:
    return Counter(result % MICRO_BATCHES for result in results)


@dataclass
class Rank:
    """A rank's memory. `story` tells by which generations each iteration was done: what makes two states equal bit by bit.

    `trained` are the results that are in its parameters, and `done` those that are in its buckets.
    """

    has_state: bool = False
    story: tuple[int, ...] = ()
    trained: frozenset[int] = frozenset()
    was_in: int = -1
    under_way: int = -1
    share: frozenset[int] = frozenset()
    done: set[int] = field(default_factory=set)
    buckets: list[Counter] = field(default_factory=lambda: [Counter() for _ in range(BUCKETS)])
    reduced: dict[int, int] = field(default_factory=dict)

    def standing(self, rank: int, node: str) -> Standing:
        return Standing(
            rank=rank,
            node=node,
            has_state=self.has_state,
            iteration=len(self.story) - 2,
            lineage=self.story[-1] if self.story else -1,
            under_way=self.under_way,
            share=self.share,
            done=frozenset(micro_batches(self.done)),
            reduced=dict(self.reduced),
            was_in=self.was_in,
        )

    def begin(self, iteration: int, micro_batches=()) -> None:
        self.under_way, self.share = iteration, frozenset(micro_batches)
        self.done, self.reduced, self.buckets = set(), {}, [Counter() for _ in range(BUCKETS)]

    def compute(self, micro_batch: int) -> None:
        result = result_of(micro_batch)
        self.done.add(result)
        for number, bucket in enumerate(self.buckets):
            if number not in self.reduced:
                bucket[result] += 1


def apply(agreed: Agreement, ranks: list[Rank], generation: int) -> None:
    """Carry an agreement out, checking that nobody is asked for what it has not."""
    for rank in ranks:
        rank.was_in = generation
    if agreed.loads_fallback:
        for rank in ranks:
            rank.has_state, rank.story, rank.trained = True, (generation,) * (agreed.iteration + 2), frozenset()
            rank.begin(-1)
        return
    copy_states(agreed, ranks)
    assert len({rank.story for rank in ranks}) == 1
    for number, rank in enumerate(ranks):
        if rank.under_way != agreed.iteration + 1 or not agreed.is_resumed:
            rank.begin(agreed.iteration + 1)
        elif micro_batches(rank.done).keys() != agreed.keeps[number]:
            assert agreed.keeps[number] == frozenset()
            for bucket in set(range(BUCKETS)) - rank.reduced.keys():
                rank.buckets[bucket] = Counter()
            rank.done = set()
    copy_buckets(agreed, ranks)
    assert all(rank.reduced == dict(agreed.reduced) for rank in ranks)


def copy_states(agreed: Agreement, ranks: list[Rank]) -> None:
    for rank, source in agreed.source_of.items():
        if source is not None:
            assert ranks[source].has_state
            assert rank not in agreed.holders
            ranks[rank].has_state, ranks[rank].story = True, ranks[source].story
            ranks[rank].trained = ranks[source].trained
            ranks[rank].begin(-1)


def copy_buckets(agreed: Agreement, ranks: list[Rank]) -> None:
    for number, giver in agreed.bucket_from.items():
        assert ranks[giver].reduced[number] == agreed.reduced[number]
        for rank in agreed.lacks[number]:
            ranks[rank].buckets[number] = Counter(ranks[giver].buckets[number])
            ranks[rank].reduced[number] = agreed.reduced[number]


def live(ranks: list[Rank], agreed: Agreement, generation: int, random: Random) -> None:
    """A generation that ends anywhere in its first iteration, or in the one after."""
    todo = [list(agreed.todo[rank]) for rank in range(len(ranks))]
    for iteration in range(agreed.iteration + 1, agreed.iteration + 3):
        for number, rank in enumerate(ranks):
            if rank.under_way != iteration:
                rank.begin(iteration, share(MICRO_BATCHES, rank=number, world_size=len(ranks)))
                todo[number] = sorted(rank.share)
        breaks_off = random.random() < 0.3
        for rank, left in zip(ranks, todo, strict=True):
            for micro_batch in left[: random.randint(0, len(left)) if breaks_off else None]:
                rank.compute(micro_batch)
        if breaks_off or not sum_and_step(ranks, generation, random):
            return


def sum_and_step(ranks: list[Rank], generation: int, random: Random) -> bool:
    """Whether all ranks have got through it."""
    for bucket in set(range(BUCKETS)) - ranks[0].reduced.keys():
        total = sum((rank.buckets[bucket] for rank in ranks), Counter())
        assert micro_batches(total.elements()) == ALL
        lucky = ranks if random.random() < 0.7 else [rank for rank in ranks if random.random() < 0.5]
        for rank in lucky:
            rank.buckets[bucket], rank.reduced[bucket] = Counter(total), generation
        if len(lucky) < len(ranks):
            break
    complete = [rank for rank in ranks if len(rank.reduced) == BUCKETS]
    step(complete, generation)
    return len(complete) == len(ranks)


def step(ranks: list[Rank], generation: int) -> None:
    for rank in ranks:
        assert all(micro_batches(bucket.elements()) == ALL for bucket in rank.buckets)
        rank.story += (generation,)
        rank.trained = rank.trained.union(*rank.buckets)
        rank.begin(-1)


def check_account(agreed: Agreement, ranks: list[Rank], done: list[set[int]], *, is_crash: bool) -> None:
    """Each result that a rank had before goes on in its buckets, is in the state of all, or is told to be discarded.

    After a mere crash nothing is. Of a rank that was away, what has gone into the training in spite of that may be told, too.
    """
    for number, had in enumerate(done):
        kept, discarded = agreed.keeps[number], agreed.discards[number]
        assert not kept & discarded
        lost = {result for result in had - ranks[number].trained if result % MICRO_BATCHES not in kept}
        assert micro_batches(lost).keys() <= discarded <= micro_batches(had).keys()
        assert not discarded or not is_crash


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_generations=st.integers(1, 8))
def test_each_micro_batch_counts_once_in_each_bucket_after_any_history(seed: int, num_generations: int) -> None:
    random, people = Random(seed), []
    for generation in range(1, num_generations + 1):
        present = [rank for rank in people if random.random() < 0.8]
        ranks = present + [Rank() for _ in range(random.randint(0 if present else 1, 2))]
        random.shuffle(ranks)
        standings = [rank.standing(number, random.choice("ab")) for number, rank in enumerate(ranks)]
        fallback = random.choice([-1, -1, -1, 0])

        def decide(told: list[Standing], fallback: int = fallback) -> Agreement:
            return agree(told, num_micro_batches=MICRO_BATCHES, num_buckets=BUCKETS, fallback_iteration=fallback)

        agreed = decide(standings)
        assert agreed == decide(random.sample(standings, len(standings)))
        done = [set(rank.done) for rank in ranks]
        is_crash = all(rank.was_in == generation - 1 for rank in present) and not agreed.loads_fallback
        apply(agreed, ranks, generation)
        check_account(agreed, ranks, done, is_crash=is_crash)
        live(ranks, agreed, generation, random)
        left = [rank for rank in people if all(rank is not one for one in present)]
        people = [rank for rank in ranks + left if random.random() < 0.8]


some = st.frozensets(st.integers(0, MICRO_BATCHES - 1))
anywhere = st.fixed_dictionaries(
    {
        "has_state": st.booleans(),
        "iteration": st.integers(-1, 3),
        "lineage": st.integers(-1, 2),
        "under_way": st.integers(-1, 4),
        "done": some,
        "reduced": st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(0, 2)),
        "was_in": st.integers(-1, 2),
    }
)


@given(told=st.lists(anywhere, min_size=2, max_size=6), replica_size=st.sampled_from([1, 2]), fallback=st.integers(-1, 4))
def test_whatever_ranks_say_what_each_has_done_is_kept_or_discarded_or_in_what_all_have(told, replica_size, fallback) -> None:
    ranks = told[: len(told) // replica_size * replica_size]
    standings = [Standing(rank=rank, node="n", **it) for rank, it in enumerate(ranks)]
    counts = {"num_micro_batches": MICRO_BATCHES, "num_buckets": BUCKETS, "replica_size": replica_size}
    agreed = agree(standings, fallback_iteration=fallback, fallback_generation=2, **counts)
    lineage = 2 if agreed.loads_fallback else agreed.lineage
    for it in standings:
        kept, discarded = agreed.keeps[it.rank], agreed.discards[it.rank]
        assert not kept & discarded
        if kept | discarded != it.done:
            assert not discarded
            is_complete = it.under_way <= agreed.iteration and it.was_in == lineage
            assert is_complete or (it.under_way == agreed.iteration + 1 and not any(agreed.todo.values()))
