"""What ranks agree on when they come into a generation: the rules, one by one."""

from unicron_lib.training.agreement import Agreement, Standing, agree


def standing(rank: int, **changes) -> Standing:
    """A rank that has completed iteration 4 in generation 1 and has begun the next one."""
    values = {"node": f"n{rank}", "has_state": True, "iteration": 4, "lineage": 1, "loss": 2.5, "under_way": 5}
    return Standing(rank=rank, **values | changes)


def newcomer(rank: int, node: str = "new") -> Standing:
    return Standing(rank=rank, node=node, has_state=False)


def agreed(*standings: Standing, fallback: int = -1, micro_batches: int = 8, buckets: int = 4) -> Agreement:
    return agree(standings, num_micro_batches=micro_batches, num_buckets=buckets, fallback_iteration=fallback)


def done(*micro_batches: int) -> frozenset[int]:
    return frozenset(micro_batches)


def test_without_any_state_all_load_the_fallback() -> None:
    found = agreed(newcomer(0), newcomer(1), fallback=7)
    assert found.loads_fallback
    assert (found.iteration, found.source_of, found.is_resumed) == (7, {0: None, 1: None}, False)


def test_a_fallback_that_is_newer_than_every_memory_is_loaded_by_all() -> None:
    found = agreed(standing(0, done=done(1)), newcomer(1), fallback=5)
    assert found.loads_fallback
    assert (found.iteration, found.is_resumed) == (5, False)


def test_a_memory_as_new_as_the_fallback_is_preferred() -> None:
    found = agreed(standing(0), newcomer(1), fallback=4)
    assert (found.holders, found.source_of, found.loss) == ((0,), {0: None, 1: 0}, 2.5)


def test_who_is_an_iteration_behind_gets_the_whole_state_and_its_part_does_not_count() -> None:
    """Some ranks have stepped and others have not when the failure comes: it happens."""
    found = agreed(
        standing(0, iteration=5, under_way=-1),
        standing(1, done=done(4, 5, 6, 7), reduced={0: 1, 1: 1}),
    )
    assert (found.iteration, found.holders, found.source_of) == (5, (0,), {0: None, 1: 0})
    assert (found.keeps[1], found.reduced, found.is_resumed) == (done(), {}, False)


def test_of_two_ways_to_the_same_iteration_the_newer_generation_counts() -> None:
    """One was cut off after its step; the others did the iteration again, and their sum has other last digits."""
    found = agreed(standing(0, lineage=1, done=done(0)), standing(1, lineage=2, done=done(1)), standing(2, lineage=2))
    assert (found.holders, found.lineage, found.source_of[0]) == ((1, 2), 2, 1)
    assert found.keeps == {0: done(), 1: done(1), 2: done()}


def test_a_state_comes_from_the_same_node_if_it_can_and_else_from_the_holder_that_serves_fewest() -> None:
    found = agreed(standing(0), standing(1), newcomer(2, "n1"), newcomer(3), newcomer(4), newcomer(5, "n1"))
    assert found.source_of == {0: None, 1: None, 2: 1, 3: 0, 4: 0, 5: 1}


def test_what_a_lost_rank_had_done_is_spread_over_all_ranks_newcomers_too() -> None:
    found = agreed(
        standing(0, share=done(0, 1, 2), done=done(0, 1, 2)), standing(1, share=done(3, 4), done=done(3)), newcomer(2)
    )
    assert found.keeps == {0: done(0, 1, 2), 1: done(3), 2: done()}
    assert found.todo == {0: (4, 7), 1: (5,), 2: (6,)}
    assert found.in_place_of_lost == {0: (7,), 1: (5,), 2: (6,)}


def test_a_bucket_that_one_holder_has_is_final_and_given_to_all_who_lack_it() -> None:
    found = agreed(standing(0, reduced={0: 1}), standing(1, reduced={0: 1, 1: 1}), standing(2), newcomer(3))
    assert (found.reduced, found.bucket_from) == ({0: 1, 1: 1}, {0: 0, 1: 1})
    assert found.lacks == {0: (2, 3), 1: (0, 2, 3)}


def test_of_two_sums_of_a_bucket_the_newer_one_replaces_the_other() -> None:
    found = agreed(standing(0, reduced={0: 1}), standing(1, reduced={0: 3}))
    assert (found.reduced, found.bucket_from, found.lacks) == ({0: 3}, {0: 1}, {0: (0,)})


def test_nothing_is_computed_when_all_buckets_are_final() -> None:
    found = agreed(standing(0, done=done(0), reduced=dict.fromkeys(range(4), 1)), standing(1, done=done(1)))
    assert found.is_resumed
    assert found.todo == {0: (), 1: ()}


def test_of_two_ranks_with_the_same_micro_batch_one_loses_its_whole_part() -> None:
    found = agreed(standing(0, done=done(0, 1)), standing(1, done=done(1, 2, 3)), standing(2, done=done(4)))
    assert found.keeps == {0: done(), 1: done(1, 2, 3), 2: done(4)}
    assert sorted(m for todo in found.todo.values() for m in todo) == [0, 5, 6, 7]


def test_a_part_of_another_iteration_does_not_count() -> None:
    found = agreed(standing(0, under_way=4, done=done(0), reduced={0: 1}), standing(1))
    assert not found.is_resumed


def test_if_nothing_is_left_of_the_iteration_it_is_a_new_one() -> None:
    found = agreed(standing(0, share=done(0, 1)), standing(1))
    assert not found.is_resumed
    assert found.in_place_of_lost == {0: (), 1: ()}


def test_what_a_rank_had_done_for_an_iteration_that_others_have_completed_with_it_is_not_lost() -> None:
    """A crash in the tail of an all-reduce: rank 0 waits in it, the others are in the next iteration."""
    others = [standing(rank, lineage=3, was_in=3, done=done(2 * rank, 2 * rank + 1)) for rank in (1, 2)]
    behind = standing(0, iteration=3, lineage=3, under_way=4, was_in=3, done=done(0, 1), reduced={0: 3})
    found = agreed(behind, *others)
    assert found.keeps == {0: done(), 1: done(2, 3), 2: done(4, 5)}
    assert found.discards == {0: done(), 1: done(), 2: done()}


def test_what_others_have_completed_without_a_rank_is_lost_of_it() -> None:
    behind = standing(0, iteration=3, lineage=1, under_way=4, was_in=1, done=done(0, 1))
    assert agreed(behind, standing(1, lineage=2, was_in=2)).discards == {0: done(0, 1), 1: done()}


def test_what_is_done_of_an_iteration_that_nobody_goes_on_with_is_lost() -> None:
    stale = standing(0, lineage=1, was_in=1, done=done(0))
    found = agreed(stale, standing(1, lineage=2, was_in=2, done=done(1)))
    assert found.discards == {0: done(0), 1: done()}
    assert agreed(stale, standing(1, was_in=1, done=done(1)), fallback=7).discards == {0: done(0), 1: done(1)}


def test_a_checkpoint_has_what_ranks_of_its_generation_had_done() -> None:
    last = standing(0, was_in=3, done=done(0, 1))
    found = agree([last], num_micro_batches=8, num_buckets=4, fallback_iteration=5, fallback_generation=3)
    assert (found.loads_fallback, found.discards) == (True, {0: done()})


def test_of_a_part_that_does_not_count_all_is_lost_unless_every_bucket_is_final() -> None:
    """Only one of the ranks of a replica has done it."""
    final = dict.fromkeys(range(4), 1)
    for reduced, discarded in (({0: 1}, done(0, 1)), (final, done())):
        ranks = standing(0, done=done(0, 1), reduced=reduced), standing(1, done=done(0), reduced=final)
        found = agree(ranks, num_micro_batches=8, num_buckets=4, fallback_iteration=-1, replica_size=2)
        assert found.keeps == {0: done(), 1: done()}
        assert found.discards[0] == discarded


def test_the_order_of_the_standings_does_not_matter() -> None:
    ranks = [standing(0, done=done(0, 1)), standing(1, done=done(1, 2)), newcomer(2), standing(3, reduced={0: 1})]
    assert agreed(*ranks) == agreed(*reversed(ranks))
