"""Real ranks go on in another layout from what those of the last one have kept, leaving or killed."""

import signal
from pathlib import Path

import pytest
from elastic import assert_undisturbed, first, held, job, reached

from unicron_lib.agent.rank_messages import RankDrained
from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.agent.slot_places import MEMORY_DIR, MEMORY_KEEPS, MEMORY_LAYOUT, MEMORY_SLOT
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.planning.memory import HeldSlot, choose

CUT = Layout(tp=2, pp=2)


def spec_in(layout: Layout) -> JobSpec:
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "min_gpus": layout.replica_size,
    }
    return job("moves", hidden_dropout=0.0, memory_interval=1, **sizes)


def found(slots: Path) -> tuple[int, int]:
    """What a transition would find: nothing is in the store."""
    headers, _ = SlotHouse(slots).compared("moves")
    slots_found = [HeldSlot(node="node-0", place=it.place, num_bytes=it.num_bytes, part=it.part) for it in headers]
    source = choose(slots_found, {"": ("node-0",)}, floor=0, saved=None, racks={})
    assert source.layout == CUT
    return source.place


def killed(ranks) -> tuple[int, None]:
    for rank in range(4):
        ranks.signal("moves", 1, rank, signal.SIGKILL)
    return 0, None


def drained(ranks) -> tuple[int, str]:
    ranks.agent.order(1, 3, "drain")
    told = [ranks.agent.wait(RankDrained, generation=1, rank=rank)[1] for rank in range(4)]
    return told[0].iteration, told[0].manifest


def parked(ranks) -> tuple[int, str]:
    """The ranks wait, and save the replica that they are."""
    held(ranks, "park", generation=1, of=range(4))
    for rank in reversed(range(4)):
        ranks.agent.order(1, rank, "save_replica")
        _, told = ranks.agent.wait(RankDrained, generation=1, rank=rank)
    for rank in range(4):
        ranks.agent.order(1, rank, "quit")
    return told.iteration, told.manifest


@pytest.mark.parametrize(
    ("end", "after"),
    [(killed, Layout(pp=2, dp=2)), (drained, Layout(dp=3)), (parked, Layout(tp=2))],
    ids=["killed", "drained", "parked"],
)
def test_another_layout_goes_on_from_memory(ranks, undisturbed: list[float], tmp_path: Path, after: Layout, end) -> None:
    slots = tmp_path / "slots"
    ranks.extra = {MEMORY_DIR: str(slots / "moves"), MEMORY_KEEPS: "1"}
    ranks.launch(spec_in(CUT), 4)
    reached(ranks, 4)
    least, manifest = end(ranks)
    for rank in range(4):
        ranks.exit_code("moves", 1, rank)
    place = found(slots)
    assert place[1] >= least, "and what was saved is kept"
    ranks.extra |= {MEMORY_SLOT: f"1/{place[1]}", MEMORY_LAYOUT: "2/2", MEMORY_KEEPS: "0"}
    ranks.launch(spec_in(after), after.num_gpus, generation=2, restore_from=manifest)
    began = first(ranks, generation=2, world_size=after.num_gpus)
    assert {p.iteration for p in began} == {place[1] + 1}
    assert {p.source for p in began} == {"slot of node-0 (resharded from tp=2 pp=2)"}
    assert_undisturbed(ranks, spec_in(after), undisturbed, generation=2, world_size=after.num_gpus)
