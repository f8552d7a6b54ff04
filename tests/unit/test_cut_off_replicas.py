"""A replica that is cut off while one of its ranks steps and another one does not: no completed iteration is lost."""

from collections import Counter
from pathlib import Path

import pytest
from elastic_world import CountingReplica, Generation, World
from kept_world import kept_job
from layout_world import replicas_of, train
from memory_peers import Killed

from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.plans import Layout
from unicron_lib.training.agreement import Standing, agree
from unicron_lib.training.ledger import check_ledger
from unicron_lib.training.peers import CollectiveFailed
from unicron_lib.training.siblings import Siblings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_who_has_not_heard_the_others_steps_as_they_have(tmp_path: Path, monkeypatch, tp: int, pp: int) -> None:
    """Of two replicas one dies as the third iteration ends, and of the other one, rank 1 is cut off from rank 0."""
    spec, calls, usual = kept_job(tp, pp, num_layers=2), Counter(), Siblings.exchange

    def exchange(self, *mine):
        told, rank = usual(self, *mine), self._replica._rank
        calls[rank] += 1
        if calls[rank] == 3 and rank in {2, 3}:
            raise Killed
        if calls[rank] == 3 and rank == 1:
            raise CollectiveFailed("RuntimeError", "Connection closed by peer")
        return told

    monkeypatch.setattr(Siblings, "exchange", exchange)
    world = World(spec, tmp_path, replicas_of(spec, Layout(tp=tp, pp=pp, dp=4), CountingReplica))
    assert not world.live(Generation(size=2))
    assert sorted(memory.position.iteration for memory in world.people.values()) == [1, 2]
    told = len(world.said)
    assert world.live(Generation(size=2))
    began = {progress.rank: progress for progress in world.said[told : told + 4]}
    assert {progress.iteration for progress in began.values()} == {3}
    assert [began[rank].source for rank in range(4)] == ["own memory", "own memory", "rank 0", "rank 1"]
    assert world.recomputed == []
    assert check_ledger(tmp_path, spec) == []
    (alone,), _ = train(kept_job(1, 1), Layout(), iterations=spec.train_iters)
    for replica in (memory.replica for memory in world.people.values()):
        for name, tensor in replica.state().items():
            piece = replica.slices[name]
            expected = alone.state()[name][piece.within(TensorSlice.all_of(piece.whole))]
            assert float((tensor - expected).abs().max()) <= 1e-12, name


# --- the rule


def standing(rank: int, **changes) -> Standing:
    values = {"node": "n", "has_state": True, "iteration": 4, "lineage": 1, "under_way": 5, "reduced": {0: 2, 1: 2}}
    return Standing(rank=rank, **values | changes)


def ahead(rank: int, **changes) -> Standing:
    return standing(rank, **{"iteration": 5, "lineage": 2, "under_way": -1, "reduced": {}, "grad_norm": 0.7} | changes)


def agreed(*standings: Standing):
    return agree(standings, num_micro_batches=4, num_buckets=2, fallback_iteration=-1, replica_size=2)


def test_it_steps_only_after_one_of_the_generation_that_it_was_prepared_in() -> None:
    found = agreed(ahead(0, loss=2.5), standing(1, prepared_in=2))
    assert (found.iteration, found.lineage, found.holders, found.steps[1].loss) == (5, 2, (0, 1), 2.5)
    assert agreed(ahead(0), standing(1, prepared_in=1)).loads_fallback
    assert agreed(ahead(0), standing(1)).loads_fallback


def test_it_does_not_where_nobody_knows_the_norm() -> None:
    assert agreed(ahead(0, grad_norm=None), standing(1, prepared_in=2)).loads_fallback


def test_who_gets_the_state_gets_the_norm() -> None:
    found = agreed(ahead(0), standing(1, prepared_in=2), Standing(rank=2, node="n", has_state=False), ahead(3, grad_norm=None))
    assert (found.grad_norm, found.source_of) == (0.7, {0: None, 1: None, 2: 0, 3: None})
