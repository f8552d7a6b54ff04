"""Jobs whose replicas are several ranks: any layout loads another one's checkpoint, and a crash costs one replica's work."""

import signal
import time

import pytest
from elastic import assert_undisturbed, first, held, job, reached

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankParked
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.jobs import JobSpec

PATIENCE_S = 20.0


def cut(name: str, tp: int = 1, pp: int = 1, **changes) -> JobSpec:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "min_gpus": tp * pp}
    return job(name, **{"hidden_dropout": 0.0} | sizes | changes)


def test_a_checkpoint_goes_from_layout_to_layout(ranks, undisturbed: list[float]) -> None:
    layouts = [(2, 1, 2), (1, 2, 1), (1, 1, 1), (2, 2, 1), (1, 2, 2)]
    restore_from, last = None, -1
    for generation, (tp, pp, dp) in enumerate(layouts, 1):
        spec, world_size = cut("wanders", tp, pp), tp * pp * dp
        ranks.launch(spec, world_size, generation=generation, restore_from=restore_from)
        began = first(ranks, generation=generation, world_size=world_size)
        assert {p.iteration for p in began} == {last + 1}
        if generation == len(layouts):
            break
        ranks.agent.order(generation, world_size - 1, "drain")
        drained = [ranks.agent.wait(RankDrained, generation=generation, rank=rank)[1] for rank in range(world_size)]
        assert len({(d.iteration, d.manifest) for d in drained}) == 1
        restore_from, last = drained[0].manifest, drained[0].iteration
        manifest = CheckpointRepository(open_store(ranks.store_url), "wanders").load_manifest(restore_from)
        assert (manifest.layout, manifest.format) == (spec.layout(world_size), 2 if tp * pp > 1 else 1)
        assert len(manifest.shards) == world_size
    assert_undisturbed(ranks, spec, undisturbed, generation=len(layouts), world_size=world_size)


@pytest.mark.parametrize(("tp", "pp", "lost"), [(2, 1, 3), (1, 2, 0)])
def test_the_replica_without_a_loss_goes_on_and_the_other_one_comes_back(
    ranks, undisturbed: list[float], tp: int, pp: int, lost: int
) -> None:
    spec = cut("halved", tp, pp, rerun_check_interval=2)
    ranks.launch(spec, 4)
    survivors = sorted({0, 1, 2, 3} - {lost})
    reached(ranks, 3, rank=survivors[0])
    ranks.signal("halved", 1, lost, signal.SIGKILL)
    parked = parted(ranks, "halved", of=survivors)
    whole = (2, 3) if lost == 0 else (0, 1)
    if parked.keys() >= set(whole) and len({parked[rank].iteration for rank in whole}) == 1:
        manifest = CheckpointRepository(open_store(ranks.store_url), "halved").load_manifest(saved(ranks, whole))
        assert (manifest.iteration, manifest.layout) == (parked[whole[0]].iteration, spec.layout(4))
    ranks.launch(spec, 4, generation=2, kept={rank: (1, rank) for rank in parked})
    began = first(ranks, generation=2, world_size=4)
    if parked.keys() == set(survivors):
        # a rank may have stepped while its siblings, the other half of its replica, were cut off: before they were prepared to,
        # or after, and then they step now
        newest = [max(p.iteration for rank, p in parked.items() if rank % 2 == place) for place in (0, 1)]
        assert {p.iteration for p in began} in [{min(newest) + 1}, {max(newest) + 1}]
        assert began[lost].source == f"rank {(lost + 2) % 4}"
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=4)
    assert "results of one micro-batch differ" not in ranks.logs()


def saved(ranks, replica: tuple[int, ...]) -> str:
    """Have parked ranks save the replica that they are; returns the manifest's key."""
    for rank in reversed(replica):
        ranks.agent.order(1, rank, "save_replica")
        _, told = ranks.agent.wait(RankDrained, generation=1, rank=rank)
        assert bool(told.manifest) == (rank == replica[0])
    return told.manifest


def parted(ranks, name: str, *, of: list[int]) -> dict[int, RankParked]:
    """Order ranks to park at once; like an agent, end those that do not, since gloo may not let go of them."""
    for rank in of:
        ranks.agent.order(1, rank, "abort")
    deadline = time.monotonic() + PATIENCE_S
    parked: dict[int, RankParked] = {}
    while len(parked) < len(of) and time.monotonic() < deadline:
        parked = {rank: told[-1] for rank in of if (told := ranks.agent.all(RankParked, generation=1, rank=rank))}
        time.sleep(0.01)
    for rank in set(of) - parked.keys():
        ranks.signal(name, 1, rank, signal.SIGKILL)
    return parked


def test_a_replica_that_nobody_can_replace_begins_from_the_checkpoint(ranks, undisturbed: list[float]) -> None:
    spec = cut("alone", 2, save_interval=3)
    ranks.launch(spec, 2)
    reached(ranks, 4)
    ranks.signal("alone", 1, 1, signal.SIGKILL)
    held(ranks, "abort", generation=1, of=(0,))
    manifest, _ = CheckpointRepository(open_store(ranks.store_url), "alone").newest_complete()
    ranks.launch(spec, 2, generation=2, restore_from=manifest.key, kept={0: (1, 0)})
    assert {p.source for p in first(ranks, generation=2, world_size=2)} == {manifest.key}
    assert {p.iteration for p in ranks.agent.all(Progress, generation=2, rank=0)} >= {manifest.iteration + 1}
    assert_undisturbed(ranks, spec, undisturbed, generation=2, world_size=2)
