"""Ranks that live through any history agree on something that counts each micro-batch once in each bucket.

The model is exact: a bucket is the multiset of the micro-batches that are summed in it. Standings come from a history of
generations, in each of which ranks compute, sum buckets, step, get lost, sit out, and come back with an old memory.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.training.agreement import Agreement, Standing, agree
from unicron_lib.training.data import share

MICRO_BATCHES, BUCKETS = 7, 3
ALL = Counter(range(MICRO_BATCHES))


@dataclass
class Rank:
    """A rank's memory. `story` tells by which generations each iteration was done: what makes two states equal bit by bit."""

    has_state: bool = False
    story: tuple[int, ...] = ()
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
            done=frozenset(self.done),
            reduced=dict(self.reduced),
        )

    def begin(self, iteration: int, micro_batches=()) -> None:
        self.under_way, self.share = iteration, frozenset(micro_batches)
        self.done, self.reduced, self.buckets = set(), {}, [Counter() for _ in range(BUCKETS)]

    def compute(self, micro_batch: int) -> None:
        self.done.add(micro_batch)
        for number, bucket in enumerate(self.buckets):
            if number not in self.reduced:
                bucket[micro_batch] += 1


def apply(agreed: Agreement, ranks: list[Rank], generation: int) -> None:
    """Carry an agreement out, checking that nobody is asked for what it has not."""
    if agreed.loads_fallback:
        for rank in ranks:
            rank.has_state, rank.story = True, (generation,) * (agreed.iteration + 2)
            rank.begin(-1)
        return
    copy_states(agreed, ranks)
    assert len({rank.story for rank in ranks}) == 1
    for number, rank in enumerate(ranks):
        if rank.under_way != agreed.iteration + 1 or not agreed.is_resumed:
            rank.begin(agreed.iteration + 1)
        elif rank.done != agreed.keeps[number]:
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
        assert total == ALL
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
        assert all(bucket == ALL for bucket in rank.buckets)
        rank.story += (generation,)
        rank.begin(-1)


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
        apply(agreed, ranks, generation)
        live(ranks, agreed, generation, random)
        left = [rank for rank in people if all(rank is not one for one in present)]
        people = [rank for rank in ranks + left if random.random() < 0.8]
