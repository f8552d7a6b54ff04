"""From where a job went on, in words."""

from unicron_lib.controller.origins import Origin, origin_told

LOST = Origin(source="own memory", discarded_micro_batches=3)
OWN = Origin(source="own memory", kept_micro_batches=4)
COPIED = Origin(source="rank 0", copied_bytes=900_000, copy_s=0.012, recomputed_micro_batches=4)
STORED = Origin(source="jobs/a/manifests/7.json")


def test_survivors_and_who_copied_from_them() -> None:
    told = origin_told({0: OWN, 1: COPIED, 2: OWN, 3: OWN}, held=41, stored=39)
    assert told["from"] == (
        "own memory of 3 ranks, rank 1 copied 0.9 MB from rank 0 in 0.01 s; 12 micro-batches kept, 4 computed again"
    )
    assert (told["went_on_after"], told["copied_bytes"]) == (41, 900_000)
    assert (told["kept_micro_batches"], told["recomputed_micro_batches"], told["discarded_micro_batches"]) == (12, 4, 0)


def test_work_that_is_lost_is_told_if_there_is_any() -> None:
    told = origin_told({0: OWN, 1: LOST, 2: LOST}, held=41, stored=39)
    assert told["discarded_micro_batches"] == 6
    assert told["from"] == "own memory of 3 ranks; 4 micro-batches kept, 0 computed again, 6 discarded"


def test_a_checkpoint_is_told_once_and_the_iterations_since_then_are_lost() -> None:
    told = origin_told({0: STORED, 1: STORED}, held=41, stored=39)
    assert told["from"] == "the checkpoint jobs/a/manifests/7.json"
    assert told["went_on_after"] == 39


def test_slots_of_another_layout_are_told_as_such() -> None:
    mine = Origin(source="slot of node-1 (resharded from tp=2 pp=3)")
    told = origin_told({0: mine, 1: mine, 2: COPIED}, held=41, stored=-1)
    assert told["from"].partition(";")[0] == (
        "rank 2 copied 0.9 MB from rank 0 in 0.01 s, slot of node-1 (resharded from tp=2 pp=3) for 2 ranks"
    )
    assert told["went_on_after"] == 41


def test_a_fresh_start_tells_nothing() -> None:
    assert origin_told({0: Origin(), 1: Origin()}, held=None, stored=-1) == {}


def test_much_is_told_in_larger_units() -> None:
    one = Origin(source="rank 3", copied_bytes=98_000_000_000, copy_s=20.0)
    assert origin_told({7: one}, held=1, stored=0)["from"] == "rank 7 copied 98.0 GB from rank 3 in 20.00 s"
