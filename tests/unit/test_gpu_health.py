"""When a GPU counts as broken or gone, and how often that is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.detection.gpu import GpuReading, judge
from unicron_lib.detection.gpu_watch import GpuInventory, GpuWatch

FINE = GpuReading(index=3, uuid="GPU-3", name="H200", ecc_uncorrected_volatile=2, row_remap_failure=False)
LOST = GpuReading(index=3, uuid="GPU-3", name="H200", lost=True, error_code=15)
LINKED = replace(FINE, nvlinks_up=(0, 1, 2), nvlink_crc_errors=10, nvlink_replays=10, nvlink_recoveries=1)


def ecc(count: int | None) -> GpuReading:
    return replace(FINE, ecc_uncorrected_volatile=count)


def aggregate(count: int | None) -> GpuReading:
    return replace(FINE, ecc_uncorrected_aggregate=count)


def after(seconds: float, **changes: object) -> GpuReading:
    return replace(LINKED, seen_at=seconds, **changes)


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (None, FINE, None),
        (FINE, FINE, None),
        (FINE, ecc(3), "ecc_error"),
        (FINE, ecc(0), None),
        (FINE, ecc(None), None),
        (ecc(None), ecc(3), None),
        (None, ecc(3), None),
        (aggregate(7), aggregate(8), "ecc_error"),
        (aggregate(7), aggregate(7), None),
        (None, aggregate(7), None),
        (FINE, LOST, "gpu_lost"),
        (None, LOST, "gpu_lost"),
        (FINE, replace(FINE, row_remap_failure=True), "ecc_error"),
        (None, replace(FINE, row_remap_failure=True), "ecc_error"),
        (FINE, replace(FINE, row_remap_failure=None, row_remap_pending=True), None),
        (FINE, GpuReading(index=3, uuid="GPU-3", name="H200", error_code=999), None),
        (FINE, GpuReading(index=3, uuid="GPU-3", name="H200", error_code=16), "gpu_driver_error"),
        (FINE, GpuReading(index=3, uuid="GPU-3", name="H200", error_code=11), "gpu_driver_error"),
        (LINKED, after(5, nvlinks_up=(0, 2)), "nvlink_error"),
        (LINKED, after(5, nvlinks_up=(0, 1, 2, 3)), None),
        (LINKED, after(5, nvlinks_up=None), None),
        (FINE, replace(FINE, nvlinks_up=()), None),
        (None, replace(LINKED, nvlinks_up=()), None),
        (LINKED, after(5, nvlink_replays=509), None),
        (LINKED, after(5, nvlink_replays=510), "nvlink_error"),
        (LINKED, after(60, nvlink_replays=510), None),
        (LINKED, after(5, nvlink_crc_errors=510), "nvlink_error"),
        (LINKED, after(5, nvlink_recoveries=3), None),
        (LINKED, after(5, nvlink_recoveries=4), "nvlink_error"),
        (LINKED, after(5, nvlink_replays=0), None),
        (LINKED, after(5, nvlink_replays=None), None),
        (FINE, after(5, nvlink_replays=10**9), None),
        (FINE, replace(FINE, mig=True, utilization_ratio=None, memory_used_bytes=None), None),
    ],
)
def test_judgement(before: GpuReading | None, now: GpuReading, kind: str | None) -> None:
    found = judge(before, now)
    assert [finding.kind for finding in found] == ([kind] if kind else [])
    for finding in found:
        assert (finding.gpu, finding.uuid) == (3, "GPU-3")
        assert finding.evidence.startswith("GPU 3 (H200, GPU-3) ")


def test_all_that_is_wrong_is_found_the_gravest_first() -> None:
    now = after(5, ecc_uncorrected_volatile=3, row_remap_failure=True, nvlinks_up=(1,))
    assert [found.kind for found in judge(LINKED, now)] == ["ecc_error", "ecc_error", "nvlink_error"]


def test_the_evidence_says_what_was_counted() -> None:
    (found,) = judge(LINKED, after(5, nvlink_replays=1010))
    assert found.evidence.endswith("counts 1000 NVLink replays within 5.0 s, 100 a second are too many")


def test_a_gpu_that_never_told_its_uuid_is_found_as_well() -> None:
    (found,) = judge(None, GpuReading(index=0, lost=True, error_code=15))
    assert (found.uuid, found.evidence) == (
        "",
        "GPU 0 (its UUID was never told) is lost, it no longer answers the driver (NVML error 15)",
    )


def test_a_gpu_is_blind_if_it_told_an_error_and_nothing_else() -> None:
    silent = GpuReading(index=3, uuid="GPU-3", error_code=999)
    assert silent.is_blind
    assert not replace(silent, power_w=300.0).is_blind
    assert not replace(silent, error_code=16).is_blind
    assert not LOST.is_blind
    assert not FINE.is_blind


def kinds(watch: GpuWatch, *looks: GpuReading, life: str = "b") -> list[list[str]]:
    return [[found.kind for found in watch.news([look], life=life, now=0.0)] for look in looks]


def test_each_gpu_and_kind_is_told_once() -> None:
    """PB01: one GPU is lost from the fifth look on; 16 looks later that is still one event, of that GPU."""
    watch = GpuWatch()
    others = [GpuReading(index=index, uuid=f"GPU-{index}") for index in range(8) if index != 3]
    looks = [watch.news([*others, FINE if look < 5 else LOST], life="b", now=5.0 * look) for look in range(20)]
    assert [(found.gpu, found.kind) for look in looks for found in look] == [(3, "gpu_lost")]
    assert looks[5]


def test_a_count_that_stays_high_is_told_once() -> None:
    """PB06: the value stays in the register for 30 looks after it happened."""
    assert kinds(GpuWatch(), FINE, *[ecc(3)] * 30) == [[], ["ecc_error"], *[[]] * 29]


def test_another_kind_of_the_same_gpu_is_news() -> None:
    looks = kinds(GpuWatch(), FINE, ecc(3), ecc(4), LOST, ecc(4), LOST)
    assert looks == [[], ["ecc_error"], [], ["gpu_lost"], [], []]
    rising = [after(5.0 * look, nvlink_replays=10 + 1000 * look, ecc_uncorrected_volatile=2 + look) for look in range(3)]
    assert kinds(GpuWatch(), *rising) == [[], ["ecc_error", "nvlink_error"], []]


def test_a_count_that_could_not_be_read_once_is_compared_with_the_one_before() -> None:
    assert kinds(GpuWatch(), FINE, ecc(None), LOST, ecc(3)) == [[], [], ["gpu_lost"], ["ecc_error"]]


def test_a_driver_that_is_loaded_anew_counts_from_0() -> None:
    assert kinds(GpuWatch(), FINE, ecc(0), ecc(1)) == [[], [], ["ecc_error"]]


def test_a_link_that_was_ever_up_is_missed_even_after_a_look_without_it() -> None:
    blind = GpuReading(index=3, uuid="GPU-3", error_code=999)
    assert kinds(GpuWatch(), LINKED, blind, after(10, nvlinks_up=(0, 1))) == [[], [], ["nvlink_error"]]


def test_slow_errors_never_add_up() -> None:
    looks = [after(5.0 * look, nvlink_replays=400 * look, nvlink_recoveries=2 * look) for look in range(50)]
    assert kinds(GpuWatch(), *looks) == [[]] * 50


def test_a_replaced_gpu_begins_anew() -> None:
    assert kinds(GpuWatch(), FINE, replace(ecc(7), uuid="GPU-other")) == [[], []]


def test_a_new_life_tells_again_what_is_still_wrong() -> None:
    watch = GpuWatch()
    assert kinds(watch, FINE, ecc(3), LOST, ecc(3)) == [[], ["ecc_error"], ["gpu_lost"], []]
    assert kinds(watch, ecc(3), ecc(3), life="c") == [["ecc_error"], []]


def retold(watch: GpuWatch, look: GpuReading, *times: float) -> list[list[str]]:
    return [[found.kind for found in watch.news([look], life="b", now=now)] for now in times]


DOWN = replace(LINKED, nvlinks_up=())


@pytest.mark.parametrize(("fine", "broken", "kind"), [(FINE, LOST, "gpu_lost"), (LINKED, DOWN, "nvlink_error")])
def test_what_is_still_broken_is_told_again_for_its_node_may_have_been_released(
    fine: GpuReading, broken: GpuReading, kind: str
) -> None:
    watch = GpuWatch()
    retold(watch, fine, 0.0)
    told = retold(watch, broken, *(5.0 * look for look in range(1, 400)))
    assert [1 + number for number, look in enumerate(told) if look == [kind]] == [1, 121, 241, 361]
    assert sum(map(len, told)) == 4
    assert retold(watch, fine, 5000.0) == [[]], "it was repaired"


def test_a_missing_gpu_is_told_again() -> None:
    watch, (gone,) = GpuWatch(), GpuInventory(num_gpus=1).missing((), life="b")
    assert [len(watch.news([], life="b", now=now, missing=[gone])) for now in (0.0, 5.0, 599.0, 600.0, 605.0)] == [
        1,
        0,
        0,
        1,
        0,
    ]


def test_a_count_that_has_not_risen_since_is_history() -> None:
    """The errors of a life are never forgotten by a GPU that was repaired; a new one is told."""
    watch = GpuWatch()
    retold(watch, aggregate(1), 0.0)
    assert retold(watch, aggregate(4), 5.0, 10.0, 700.0, 7000.0) == [["ecc_error"], [], [], []]
    assert retold(watch, aggregate(5), 7005.0, 7010.0) == [["ecc_error"], []]
    assert retold(watch, aggregate(6), 7015.0, 8000.0) == [[], ["ecc_error"]], "not more often than every 10 minutes"


def gpus(*uuids: str | None) -> list[GpuReading]:
    return [GpuReading(index=index, uuid=uuid, lost=uuid is None) for index, uuid in enumerate(uuids)]


def missing(inventory: GpuInventory, *uuids: str | None, life: str = "b") -> list[tuple[int, str]]:
    return [(found.gpu, found.uuid) for found in inventory.missing(gpus(*uuids), life=life)]


def test_a_gpu_that_the_driver_does_not_count_any_more_is_named() -> None:
    """The ones behind it move up; none of them is taken for the missing one."""
    inventory = GpuInventory()
    assert missing(inventory, "A", "B", "C", "D") == []
    assert missing(inventory, "A", "C", "D") == [(1, "B")]
    assert missing(inventory, "A", "C", "D") == [(1, "B")]
    assert missing(inventory, "A", "B", "C", "D") == []


def test_another_gpu_at_the_same_place_means_that_one_is_gone() -> None:
    inventory = GpuInventory()
    assert missing(inventory, "A", "B") == []
    (found,) = inventory.missing(gpus("A", "X"), life="b")
    assert found.evidence == "GPU 1 (B) is gone: the driver has X as GPU 1"
    assert missing(inventory, "A", "X", life="c") == [], "in a new life it is the one that is there"


def test_a_gpu_that_does_not_tell_who_it_is_is_not_taken_for_gone() -> None:
    inventory = GpuInventory()
    assert missing(inventory, "A", "B") == []
    assert missing(inventory, "A", None) == []


def test_there_must_be_as_many_as_the_node_offers() -> None:
    (found,) = GpuInventory(num_gpus=3).missing(gpus("A", "B"), life="b")
    assert (found.kind, found.gpu) == ("gpu_lost", 2)
    assert found.evidence.endswith("is missing: the driver counts 2 GPUs, there must be 3")


def test_a_new_life_still_misses_a_gpu_that_there_was() -> None:
    inventory = GpuInventory()
    assert missing(inventory, "A", "B", "C") == []
    assert missing(inventory, "A", "C", life="c") == [(2, "")]


@given(st.permutations(["A", "B", "C", "D"]), st.sets(st.sampled_from("ABCD")))
def test_each_missing_gpu_is_found_once_whatever_the_order(order: list[str], gone: set[str]) -> None:
    inventory = GpuInventory(num_gpus=4)
    assert missing(inventory, *order) == []
    found = missing(inventory, *(uuid for uuid in order if uuid not in gone))
    assert sorted(uuid for _, uuid in found) == sorted(gone)
