"""An iteration that one generation begins and another one ends: what is kept, copied, computed and told."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import elastic_world
import pytest
import torch
import torch.distributed as dist
from elastic_world import CPU, CountingReplica, Generation, World, small_job, state_of
from memory_peers import Fault

from unicron_lib.training.effort import Effort
from unicron_lib.training.handover import Memory
from unicron_lib.training.loop import Work
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica

SPEC = small_job()
SECOND = 13
"""The point at which the second iteration begins, for 4 ranks with 2 micro-batches each and 4 buckets."""
COMPUTED, BUCKETS = SECOND + 2, tuple(SECOND + 4 + 2 * number for number in range(4))


@pytest.fixture(scope="module")
def pool() -> Iterator[list[CountingReplica]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [CountingReplica(SPEC, CPU) for _ in range(6)]
    dist.destroy_process_group()
    torch.set_num_threads(before)


@pytest.fixture
def world(tmp_path: Path, pool: list[CountingReplica]) -> World:
    return World(SPEC, tmp_path, pool)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, pool: list[CountingReplica]) -> tuple[torch.Tensor, ...]:
    alone = World(SPEC, tmp_path_factory.mktemp("alone"), pool)
    assert alone.live(Generation(size=1))
    return state_of(alone.people[1].replica)


def first_of(world: World, generation: int):
    """What the ranks of a generation tell of its first iteration, by rank."""
    told = [p for p in world.said if p.generation == generation]
    return sorted((p for p in told if p.iteration == min(q.iteration for q in told)), key=lambda p: p.rank)


def assert_ends_as(world: World, expected: tuple[torch.Tensor, ...]) -> None:
    for memory in world.people.values():
        assert memory.position.iteration == SPEC.train_iters - 1
        for own, right in zip(state_of(memory.replica), expected, strict=True):
            torch.testing.assert_close(own, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("at", "moment", "copied_to"),
    [
        (SECOND, "before", 0),
        (COMPUTED, "before", 0),
        (BUCKETS[0], "amid", 2),
        (BUCKETS[2], "after", 0),
        (BUCKETS[3], "before", 0),
    ],
)
def test_survivors_keep_all_they_have_computed_and_share_what_is_lost(world, expected, rank, at, moment, copied_to) -> None:
    """Of a bucket that is summed amid the fault, only one survivor has the sum: the two others get it."""
    lost = Fault(rank=rank, at=at, moment=moment, lucky=frozenset({1}))
    assert not world.live(Generation(size=4, faults=(lost,)))
    assert world.fired == [lost]
    assert world.live(Generation(size=3))
    told = first_of(world, 2)
    assert [p.iteration for p in told] == [1, 1, 1]
    assert [p.kept_micro_batches for p in told] == [2, 2, 2]
    assert sum(p.recomputed_micro_batches for p in told) == 2
    assert sum(p.discarded_micro_batches for p in told) == 0
    assert [p.source for p in told] == ["own memory"] * 3
    assert sum(p.copied_bytes > 0 for p in told) == copied_to
    assert world.recomputed == []
    assert_ends_as(world, expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.usefixtures("pool")
def test_a_corrupt_rank_s_gradient_is_wrong_in_one_number_by_half(dtype: str) -> None:
    spec = small_job(params_dtype=dtype)
    replica, work = Replica(spec, CPU), Work(spec, replica=0, num_replicas=1)
    work.add_gradients(replica, 3, 0)
    right = replica.buffer.clone()
    replica.corrupt()
    replica.begin()
    work.add_gradients(replica, 3, 0)
    (place,) = (replica.buffer != right).nonzero()
    assert 0 < abs(float(replica.buffer[place]) / float(right[place]) - 1) <= 0.5


def test_an_iteration_of_two_generations_is_not_measured(world) -> None:
    world.live(Generation(size=4, faults=(Fault(rank=0, at=COMPUTED),)))
    world.live(Generation(size=3))
    resumed, later = ([p for p in world.said if (p.generation, p.iteration) == (2, iteration)] for iteration in (1, 2))
    assert [(p.compute_s, p.iteration_s, p.flops) for p in resumed] == [(0.0, 0.0, 0.0)] * 3
    assert all(min(p.compute_s, p.iteration_s, p.flops) > 0 for p in later)


def test_who_has_not_stepped_gets_the_state_of_the_one_that_has(world, expected) -> None:
    """Which has begun the next iteration by then. The others' work is in that state: none of it is lost."""
    world.live(Generation(size=4, faults=(Fault(rank=3, at=BUCKETS[3], moment="amid", lucky=frozenset({1})),)))
    assert sorted(m.position.iteration for m in world.people.values()) == [0, 0, 1]
    assert world.live(Generation(size=3))
    told = first_of(world, 2)
    assert [(p.iteration, p.source, p.kept_micro_batches) for p in told] == [
        *((2, "rank 1", 0), (2, "own memory", 2), (2, "rank 1", 0)),
    ]
    assert [p.discarded_micro_batches for p in told] == [0, 0, 0]
    assert world.recomputed == []
    assert_ends_as(world, expected)


def test_a_newcomer_gets_the_state_and_its_part_of_what_is_missing(world, expected) -> None:
    world.live(Generation(size=4, faults=(Fault(rank=0, at=COMPUTED),)))
    assert world.live(Generation(size=4))
    told = first_of(world, 2)
    assert [p.source for p in told] == ["own memory"] * 3 + ["rank 1"]  # which is on its node
    assert [p.kept_micro_batches for p in told] == [2, 2, 2, 0]
    assert told[3].copied_bytes == sum(t.nbytes for t in expected)
    assert_ends_as(world, expected)


def test_a_job_that_was_parked_between_two_iterations_begins_the_next_one_anew(world, expected) -> None:
    assert not world.live(Generation(size=4, faults=(Fault(rank=2, at=COMPUTED, kind="park"),)))
    assert {m.position.iteration for m in world.people.values()} == {1}
    assert world.live(Generation(size=6))
    told = first_of(world, 2)
    assert [p.source for p in told[:4]] == ["own memory"] * 4
    assert all(p.compute_s > 0 and not p.kept_micro_batches for p in told)
    assert_ends_as(world, expected)


def test_who_comes_back_with_what_others_have_done_again_meanwhile_tells_that_it_is_lost(world, expected) -> None:
    world.live(Generation(size=4, faults=(Fault(rank=0, at=COMPUTED),)))
    assert [len(memory.effort.done) for memory in world.people.values()] == [2, 2, 2]
    world.live(Generation(size=2, absent=frozenset({0}), faults=(Fault(rank=0, at=COMPUTED + 4),)))
    assert world.live(Generation(size=2))
    told = first_of(world, 3)
    assert [p.discarded_micro_batches for p in told] == [2, 0]
    assert_ends_as(world, expected)


@pytest.mark.parametrize(
    ("at", "given_up"),
    [
        pytest.param(0, 0, id="before they agree"),
        *(pytest.param(at, 2, id=f"amid the copy ({at})") for at in (1, 4)),
        *(pytest.param(at, 2, id=f"in the first iteration ({at})") for at in (5, 15)),
        pytest.param(16, 0, id="once it is told"),
    ],
)
def test_what_is_lost_in_a_hand_over_that_breaks_off_is_told_by_the_next_one(world, expected, at: int, given_up: int) -> None:
    world.live(Generation(size=4, faults=(Fault(rank=0, at=COMPUTED),)))
    world.live(Generation(size=2, absent=frozenset({0}), faults=(Fault(rank=0, at=COMPUTED + 4),)))
    told = len(world.said)
    world.live(Generation(size=2, faults=(Fault(rank=1, at=at, kind="cut"),)))
    assert [memory.given_up for memory in world.people.values()] == [given_up, 0]
    assert world.live(Generation(size=2))
    assert sum(p.discarded_micro_batches for p in world.said[told:] if p in first_of(world, p.generation)) == 2
    assert_ends_as(world, expected)


def test_without_any_survivor_the_newest_checkpoint_is_loaded(world, expected) -> None:
    world.live(Generation(size=1, faults=(Fault(rank=0, at=60),)))
    assert world.fired
    assert world.checkpoints.iteration == 1
    assert world.live(Generation(size=2))
    assert [(p.iteration, p.source) for p in first_of(world, 2)] == [(2, "manifest")] * 2
    assert_ends_as(world, expected)


def test_a_checkpoint_of_the_iteration_under_way_has_what_the_survivors_had_done_of_it(world, expected) -> None:
    """Rank 0 has saved it, and is lost; all others wait in its all-reduce."""
    cut_off = Fault(rank=3, at=BUCKETS[3], moment="amid", lucky=frozenset({0}))
    world.live(Generation(size=4, faults=(cut_off, Fault(rank=0, at=BUCKETS[3] + 2))))
    assert world.checkpoints.iteration == 1
    assert [(m.position.iteration, len(m.effort.done)) for m in world.people.values()] == [(0, 2), (0, 2)]
    assert world.live(Generation(size=2))
    told = first_of(world, 2)
    assert [(p.iteration, p.source, p.discarded_micro_batches) for p in told] == [(2, "manifest", 0)] * 2
    assert_ends_as(world, expected)


def test_a_stop_of_an_earlier_generation_is_over_but_its_save_is_made_up_for(world, expected) -> None:
    """The flags came with the last bucket, which was summed before the ranks could step."""
    world.live(Generation(size=1, faults=(Fault(rank=0, at=9, kind="cut"),)))
    (memory,) = world.people.values()
    assert memory.effort.done == set(range(8))
    memory.replica.flag(stop=True, save=True, spoil=False)
    memory.effort.reduced = dict.fromkeys(range(4), 1)
    assert world.live(Generation(size=2))
    assert world.checkpoints.saves == [0, 1]
    assert world.recomputed == []
    assert_ends_as(world, expected)


def test_a_micro_batch_leaves_out_the_same_whoever_computes_it_and_changes_no_other_randomness(pool) -> None:
    before, gradients = torch.get_rng_state(), []
    for replica, iteration in ((pool[0], 3), (pool[1], 3), (pool[0], 4)):
        replica.initialize()
        replica.begin()
        effort, replica.computed = Effort(), []
        effort.begin(iteration, [5])
        Work(SPEC, replica=0, num_replicas=1).do(replica, effort)
        gradients.append(replica.buffer.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_micro_batches_that_are_added_later_leave_final_buckets_alone(pool) -> None:
    replica, effort, work = pool[0], Effort(), Work(SPEC, replica=0, num_replicas=1)
    replica.initialize()
    replica.begin()
    replica.computed = []
    effort.begin(0, [0, 1])
    effort.reduced = {0: 1, 2: 1}
    replica.buckets[2].fill_(3.0)
    work.do(replica, effort)
    assert [bool(bucket.any()) for bucket in replica.buckets] == [False, True, True, True]
    assert torch.equal(replica.buckets[2], torch.full_like(replica.buckets[2], 3.0))


class Kept:
    """Stands in for a node's slots: notes whose state is kept, by where that lies."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()

    def is_due(self, _iteration: int) -> bool:
        return True

    def keep(self, _position: Position, state: dict[str, torch.Tensor], *, travels: bool) -> bool:
        assert not travels
        self.addresses.add(address_of(state))
        return True


def address_of(state: dict[str, torch.Tensor]) -> int:
    return next(iter(state.values())).data_ptr()


def test_of_the_ranks_of_a_node_one_keeps_the_state_for_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr(elastic_world, "Memory", partial(Memory, snapshots=kept))
    told = world._environment
    monkeypatch.setattr(
        world, "_environment", lambda rank, size, **node: replace(told(rank, size, **node), keeps=int(rank == 0))
    )
    assert world.live(Generation(size=4))
    assert kept.addresses == {address_of(world.people[1].replica.state())}
